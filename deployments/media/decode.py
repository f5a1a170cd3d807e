"""Bytes of a file to an RGB picture, within limits. It takes a core: never on the event loop."""

import io
import warnings
from typing import Any

from PIL import Image, ImageOps

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.media.settings import MediaSettings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
OPAQUE = ("RGB", "L", "CMYK", "YCbCr", "1")


class Pictures:
    """Opens images: files, or pictures of Python's."""

    def __init__(self, settings: MediaSettings) -> None:
        self._max_pixels = settings.max_pixels

    def decode(self, data: bytes, param: str) -> Image.Image:
        """See ``decode``."""
        return decode(data, self._max_pixels, param)

    def given(self, value: Any, param: str) -> Image.Image:
        """A picture of PIL's in RGB.

        Raises:
            InvalidRequest: it is something else.
        """
        if not isinstance(value, Image.Image):
            raise InvalidRequest(f"'{param}' must be a PIL.Image.Image.", param, "invalid_type")
        return to_rgb(value)


def decode(data: bytes, max_pixels: int, param: str) -> Image.Image:
    """Returns the picture in RGB: turned as its EXIF says, on white where it is transparent.

    Of an animation it is the first frame. The size is checked before any pixel is decoded.

    Raises:
        InvalidRequest: no image, broken, of another format, or too many pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_size(image, max_pixels, param)
            image.load()
            return to_rgb(ImageOps.exif_transpose(image))
    except InvalidRequest:
        raise
    except Exception as error:  # PIL's plugins raise whatever a broken file makes them raise
        raise InvalidRequest(
            f"'{param}' is no image that can be read; PNG, JPEG, WEBP, GIF and BMP are.",
            param,
            "invalid_image",
        ) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Returns the picture in RGB, on white where it is transparent."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith(("I", "F")):  # 16 bits and more: the upper ones
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if image.mode in OPAQUE and "transparency" not in image.info:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layered).convert("RGB")


def _check_size(image: Image.Image, max_pixels: int, param: str) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise InvalidRequest(
            f"'{param}' has {width} x {height} pixels; at most {max_pixels} are taken.",
            param,
            "invalid_image",
        )
