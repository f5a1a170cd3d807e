"""Pixtral's processor for images. transformers' own class of it asks for torchvision."""

from typing import Any

from transformers.processing_utils import ProcessorMixin


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
        """The text of an image of ``image_inputs``."""
        height, width = image_inputs["image_sizes"][image_idx]
        row = self.image_token * (width // self._pixels)
        rows = [row] * (height // self._pixels)
        return self._row_end.join(rows) + self._end
