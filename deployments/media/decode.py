"""Bytes of a file to an RGB picture, within limits. It takes a core: never on the event loop."""

import io
import warnings

from PIL import Image, ImageOps

from rayfin.actors.errors import InvalidRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
OPAQUE = ("RGB", "L", "CMYK", "YCbCr", "1")


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
