"""An image as its model's encoder reads it, and the tokens that stand for it in a prompt.

Both come from transformers' processor of the model, on its path without torchvision. An image is
processed alone, so what its encoder gets never depends on the images beside it.
"""

from collections.abc import Mapping
from typing import Any

from PIL.Image import Image
from transformers.processing_utils import ProcessorMixin

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.assemble import assembled
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.media.processed import ProcessedMedia, ReplacingText, as_arrays, processed

GRID = "image_grid_thw"
FOR_PROMPTS = {"num_patches", "rows", "cols", "num_crops"}
"""What image processors give for the sake of the prompt alone."""


class ImageProcessor:
    """The image side of a model's processor (``MediaProcessor``)."""

    kind: MediaKind = "image"

    def __init__(self, processor: Any, settings: Mapping[str, Any]) -> None:
        self._processor = processor
        tokenizer = self._processor.tokenizer
        merged = self._processor._merge_kwargs(
            tokenizer_init_kwargs=tokenizer.init_kwargs, **settings
        )
        self._options = {**merged["images_kwargs"], "return_tensors": "np"}
        self.token = str(self._processor.image_token)
        self.place_id = int(tokenizer.convert_tokens_to_ids(self.token))
        """The token that a template has for an image ..."""
        image_ids = [token for token in processor.image_token_ids if token is not None]
        self.media_token_id = int(image_ids[0]) if len(image_ids) == 1 else self.place_id
        """... and the one that stands for each of its embeddings: mostly the same."""
        self.types_of_images = bool(getattr(processor, "return_mm_token_type_ids", False))
        self._for_prompts = FOR_PROMPTS | set(self._processor.unused_input_names)
        self._texts = ReplacingText(tokenizer)

    @classmethod
    def load(cls, args: EngineArgs) -> "ImageProcessor":
        """The processor of the model's folder; see ``assembled`` for what it raises."""
        inner = assembled(args, {"image_processor": _read_part(args)}, _own_class)
        return cls(inner, args.mm_processor_kwargs or {})

    @property
    def chat_template(self) -> str | None:
        """The template of older folders, which is in a file of the processor's."""
        template = getattr(self._processor, "chat_template", None)
        return template if isinstance(template, str) else None

    def process(self, image: Image) -> ProcessedMedia:
        """Scales and cuts an RGB image; takes milliseconds to seconds of a core.

        Raises:
            InvalidRequest: the model's processor refuses it.
        """
        inner = self._processor
        try:
            laid_out, *_ = inner.prepare_inputs_layout(images=[image], text=[self.token])
            features, (text,) = inner._process_images(laid_out, **self._options)
        except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidRequest(
                f"This model's processor refuses the image: {reason}", "image", "invalid_image"
            ) from error
        arrays = as_arrays(features, self._for_prompts)
        grid = tuple(arrays[GRID][0].tolist()) if GRID in arrays else ()
        return processed(arrays, self._texts.ids(text), grid)


class PixtralProcessor(ProcessorMixin):
    """What stands for an image in a prompt: its rows of patches, each ended by a token.

    Args:
        patch_size: pixels of a patch of the tower.
        spatial_merge_size: patches that become one token, in height and in width.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **_: Any,
    ) -> None:
        parts = (image_processor, tokenizer)
        super().__init__(*parts, chat_template=chat_template)  # type: ignore[no-untyped-call]
        self.image_token = image_token
        self._row_end, self._end = image_break_token, image_end_token
        self._pixels = patch_size * spatial_merge_size  # of a token

    def _process_images(self, images: Any, **settings: Any) -> Any:
        return super()._process_images(images, **{**settings, "patch_size": self._pixels})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        """Returns the text of an image of ``image_inputs``."""
        height, width = image_inputs["image_sizes"][image_idx]
        row = self.image_token * (width // self._pixels)
        rows = [row] * (height // self._pixels)
        return self._row_end.join(rows) + self._end


def _own_class(kind: str | None) -> Any:
    """The class of a processor for images where transformers' own needs further packages."""
    if kind == "PixtralProcessor":
        return PixtralProcessor
    if kind == "SmolVLMProcessor":
        from transformers.models.smolvlm import processing_smolvlm

        # It wants the package even where no video needs a number in words.
        module: Any = processing_smolvlm
        if module.num2words is None:
            module.num2words = str
    return None


def _read_part(args: EngineArgs) -> Any:
    from transformers import AutoImageProcessor

    auto: Any = AutoImageProcessor
    hub: Any = {"trust_remote_code": args.trust_remote_code, **args.hub}
    return auto.from_pretrained(args.model, backend="pil", **hub)
