"""An image as its model's encoder reads it, and the tokens that stand for it in a prompt.

Both come from transformers' processor of the model, on its path without torchvision. An image is
processed alone, so what its encoder gets never depends on the images beside it.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, InvalidRequest
from rayfin.actors.images.image_input import ImageInput
from rayfin.actors.model_files.plain_config import is_known_decoder

if TYPE_CHECKING:  # transformers takes seconds, and a server without images needs none of this
    from transformers import PretrainedConfig
    from transformers.processing_utils import ProcessorMixin

logger = logging.getLogger(__name__)

Pixels: TypeAlias = dict[str, npt.NDArray[Any]]
GRID = "image_grid_thw"
FOR_PROMPTS = {"num_patches", "rows", "cols", "num_crops"}
"""What image processors give for the sake of the prompt alone."""


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """What a prompt and an encoder need of an image."""

    digest: bytes
    pixels: Any  # Pixels, or a Ray reference to them
    ids: list[int]  # tokens in place of the one that a template has for an image
    grid: tuple[int, ...] = ()
    num_bytes: int = 0  # of the pixels


SAME_CLASS = {"gemma3"}
"""Models whose class for images is that for text too: with a processor they read images."""


def reads_images(config: "PretrainedConfig") -> bool:
    """Whether transformers has the model as one that reads images, and as no other.

    A model that it has as a plain language model too is served as that one, with a few exceptions.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = config.model_type
    reads = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return reads and (kind in SAME_CLASS or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def has_processor(args: EngineArgs) -> bool:
    """Whether the model's folder says how images are processed."""
    from transformers.utils.hub import cached_file

    names = ("preprocessor_config.json", "processor_config.json")
    found: list[Any] = [
        cached_file(
            args.model,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **args.hub,
        )
        for name in names
    ]
    return any(found)


def serves_images(args: EngineArgs, config: "PretrainedConfig") -> bool:
    """Whether the model of these settings, of this ``config``, is loaded with its tower."""
    return reads_images(config) and (config.model_type not in SAME_CLASS or has_processor(args))


def model_reads_images(args: EngineArgs) -> bool:
    """Whether the model of these settings reads images."""
    if args.language_model_only or is_known_decoder(args):
        return False
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            args.model, trust_remote_code=args.trust_remote_code, **args.hub
        )
    except (OSError, ValueError):
        return False  # the runner, which loads the model, says why
    return serves_images(args, config)


class ImageProcessor:
    """The image side of a model's processor; threads may share it."""

    def __init__(self, processor: Any, settings: Mapping[str, Any]) -> None:
        self._processor = processor
        tokenizer = self._processor.tokenizer
        merged = self._processor._merge_kwargs(
            tokenizer_init_kwargs=tokenizer.init_kwargs, **settings
        )
        self._options = {**merged["images_kwargs"], "return_tensors": "np"}
        self.image_token = str(self._processor.image_token)
        self.place_id = int(tokenizer.convert_tokens_to_ids(self.image_token))
        """The token that a template has for an image ..."""
        own = [token for token in processor.image_token_ids if token is not None]
        self.image_token_id = int(own[0]) if len(own) == 1 else self.place_id
        """... and the one that stands for each of its embeddings: mostly the same."""
        self.types_of_images = bool(getattr(processor, "return_mm_token_type_ids", False))
        self._for_prompts = FOR_PROMPTS | set(self._processor.unused_input_names)
        self._ids: dict[str, list[int]] = {}  # of texts in place of images

    @classmethod
    def load(cls, args: EngineArgs) -> "ImageProcessor | None":
        """The processor of the model's folder, or None if the model reads text only.

        Raises:
            InvalidConfig: a file is missing, or transformers does not make a processor of it.
        """
        if not model_reads_images(args):
            return None
        try:
            return cls(_load_processor(args), args.mm_processor_kwargs or {})
        except (OSError, ValueError, ImportError, AttributeError, KeyError, TypeError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidConfig(
                f"{args.model} reads images, and its processor cannot be loaded: {reason[0]}. "
                "Give its files, or language_model_only",
                "model",
            ) from error

    @property
    def chat_template(self) -> str | None:
        """The template of older folders, which is in a file of the processor's."""
        template = getattr(self._processor, "chat_template", None)
        return template if isinstance(template, str) else None

    def process(self, image: Image) -> ProcessedImage:
        """Scales and cuts an RGB image; takes milliseconds to seconds of a core.

        Raises:
            InvalidRequest: the model's processor refuses it.
        """
        inner = self._processor
        try:
            laid_out, *_ = inner.prepare_inputs_layout(images=[image], text=[self.image_token])
            made, (text,) = inner._process_images(laid_out, **self._options)
        except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidRequest(
                f"This model's processor refuses the image: {reason}", "image", "invalid_image"
            ) from error
        pixels = {
            name: np.ascontiguousarray(value)
            for name, value in made.items()
            if name not in self._for_prompts
        }
        grid = tuple(pixels[GRID][0].tolist()) if GRID in pixels else ()
        return ProcessedImage(
            digest(pixels), pixels, self._tokens(text), grid, sum(a.nbytes for a in pixels.values())
        )

    def _tokens(self, text: str) -> list[int]:
        ids = self._ids.get(text)
        if ids is None:
            ids = list(self._processor.tokenizer.encode(text, add_special_tokens=False))
            if len(self._ids) >= 256:
                self._ids.clear()
            self._ids[text] = ids
        return ids


def _load_processor(args: EngineArgs) -> "ProcessorMixin":
    """The class of processor that the folder names, without what is for videos and sound."""
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer  # noqa: F401
    from transformers.models.auto.processing_auto import processor_class_from_name
    from transformers.processing_utils import ProcessorMixin

    folder = args.model
    hub: Any = {"trust_remote_code": args.trust_remote_code, **args.hub}
    auto: Any = AutoImageProcessor
    images = auto.from_pretrained(folder, backend="pil", **hub)
    tokenizer = AutoTokenizer.from_pretrained(
        args.tokenizer or folder, trust_remote_code=args.trust_remote_code, **args.tokenizer_hub
    )
    settings, _ = ProcessorMixin.get_processor_dict(folder, **args.hub)
    kind = settings.pop("processor_class", None) or tokenizer.init_kwargs.get("processor_class")
    made = _own_class(kind) or (processor_class_from_name(kind) if kind else None)
    if made is None:
        raise ValueError(f"it names no processor that transformers knows ({kind})")
    for name in ("auto_map", "image_processor", "tokenizer", "video_processor"):
        settings.pop(name, None)
    return _make(made, images, tokenizer, settings)


def _own_class(kind: str | None) -> Any:
    """The class of a processor for images where transformers' own needs further packages."""
    if kind == "PixtralProcessor":
        from rayfin.actors.images.pixtral import PixtralProcessor

        return PixtralProcessor
    if kind == "SmolVLMProcessor":
        from transformers.models.smolvlm import processing_smolvlm

        # It wants the package even where no video needs a number in words.
        module: Any = processing_smolvlm
        if module.num2words is None:
            module.num2words = str
    return None


def _make(kind: Any, images: Any, tokenizer: Any, settings: dict[str, Any]) -> "ProcessorMixin":
    class OfImages(kind):  # type: ignore[misc]
        """The model's processor without its checks for parts that no image needs."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return type(argument)

    parts = {name: None for name in kind.get_attributes()}
    parts |= {"image_processor": images, "tokenizer": tokenizer}
    return OfImages(**parts, **settings)


def digest(pixels: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """SHA-256 of what an encoder reads: names, types, shapes and bytes."""
    whole = hashlib.sha256()
    for name in sorted(pixels):
        array = pixels[name]
        whole.update(f"{name} {array.dtype.str} {array.shape}\0".encode())
        whole.update(array.data if array.nbytes else b"")
    return whole.digest()


def put_images(
    ids: Sequence[int],
    images: Sequence[ProcessedImage],
    image_token_id: int,
    param: str,
    place_id: int | None = None,
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """Replaces the n-th place of an image in a prompt by the tokens of the n-th image.

    ``place_id`` is the token of a place, unless that is ``image_token_id`` too.

    The ids are those that users see: ``put_virtual_ids`` makes those that engines get.

    Raises:
        InvalidRequest: the prompt has another number of image tokens than images.
    """
    place = image_token_id if place_id is None else place_id
    count = sum(token == place for token in ids)
    if count != len(images):
        raise InvalidRequest(
            f"The prompt has places for {count} images, and {len(images)} are given.",
            param,
            "invalid_image_count",
        )
    whole: list[int] = []
    inputs: list[ImageInput] = []
    rest = iter(images)
    for token in ids:
        if token != place:
            whole.append(token)
            continue
        image = next(rest)
        first = image.ids.index(image_token_id)
        length = len(image.ids) - image.ids[::-1].index(image_token_id) - first
        start = len(whole) + first
        inputs.append(ImageInput(image.digest, start, length, image.pixels, image.grid))
        whole += image.ids
    return whole, tuple(inputs)
