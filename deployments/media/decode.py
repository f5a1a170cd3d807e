"""Bytes of a file, or pictures and arrays of Python's, to an RGB picture, within limits. It takes a
core: never on the event loop.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.media.settings import MediaSettings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
LAYERED = ("P", "PA", "LA", "La", "RGBA", "RGBa")  # modes of PIL's that may have an alpha channel
KEYED = ("1", "L", "I", "I;16", "I;16L", "I;16B", "RGB")  # ... and those with one clear colour
SCALES = {"L;2": 85, "L;4": 17}  # of samples of 2 and 4 bits, which PIL widens to 8 of them
WHITE = (255, 255, 255, 255)
CHANNELS = (1, 3, 4)  # of arrays: grey, RGB, and RGB with alpha

Clear = int | tuple[int, ...] | None
"""The colour that is transparent, as a picture's pixels have it."""


class Pictures:
    """Opens images: files, or pictures and arrays of Python's."""

    def __init__(self, settings: MediaSettings) -> None:
        self._max_pixels = settings.max_pixels

    def decode(self, data: bytes, param: str) -> Image.Image:
        """See ``decode``."""
        return decode(data, self._max_pixels, param)

    def given(self, value: Any, param: str) -> Image.Image:
        """A picture of PIL's, or an array, as its file would be; see ``of_array``.

        Raises:
            InvalidRequest: it is something else, empty, or its file is broken.
        """
        picture = value if isinstance(value, Image.Image) else of_array(value)
        if picture is None:
            raise InvalidRequest(
                f"'{param}' must be a PIL.Image.Image, or an array of uint8 "
                "[height, width, channels].",
                param,
                "invalid_type",
            )
        with _readable(param):
            if 0 in picture.size:
                raise ValueError("no pixels")
            return to_rgb(picture)


def decode(data: bytes, max_pixels: int, param: str) -> Image.Image:
    """Returns the picture in RGB; see ``to_rgb``.

    Of an animation it is the first frame. The size is checked before any pixel is decoded.

    Raises:
        InvalidRequest: no image, broken, of another format, or too many pixels.
    """
    with _readable(param), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_size(image, max_pixels, param)
        return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Returns the picture in RGB: turned as its EXIF says, on white where it is transparent.

    All ways in end here. Modes with 16 bits and more (I;16, I) keep their upper 8 of 16; those of
    floats (F) have 0 to 255, as PIL has it.
    """
    clear = _clear_color(image)  # for which the file's samples must not be read yet
    image.load()
    image = _turned(image)
    picture = _without_alpha(image)
    if clear is None:
        return picture
    hidden = np.asarray(image) == np.asarray(clear)
    pixels = np.array(picture)
    pixels[hidden.all(-1) if hidden.ndim == 3 else hidden] = 255
    return Image.fromarray(pixels)


def of_array(value: Any) -> Image.Image | None:
    """An array of numpy's, or a tensor of torch's, as a picture; None: it is neither.

    It has uint8, as [height, width], [height, width, channels] or [channels, height, width] with 1,
    3 or 4 channels; or uint16 or bool as [height, width].
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray):
        return None
    if value.ndim == 3 and value.shape[-1] not in CHANNELS and value.shape[0] in CHANNELS:
        value = np.moveaxis(value, 0, -1)
    if value.ndim == 3 and value.shape[-1] == 1:
        value = value[..., 0]
    deep = value.ndim == 3 and value.shape[-1] in CHANNELS
    if not (value.dtype == np.uint8 and (deep or value.ndim == 2)):
        if not (value.dtype in (np.uint16, np.bool_) and value.ndim == 2):
            return None
    return Image.fromarray(np.ascontiguousarray(value))


def _clear_color(image: Image.Image) -> Clear:
    """The colour that the picture's file says is transparent (PNG's tRNS), as PIL's pixels have it.

    A PNG has it with as many bits as its samples, which PIL changes to 8.
    """
    clear = image.info.get("transparency")
    if image.mode not in KEYED or not isinstance(clear, tuple if image.mode == "RGB" else int):
        return None
    raw = str(next((tile[3] for tile in getattr(image, "tile", ())), ""))
    if isinstance(clear, int):
        return bool(clear) if image.mode == "1" else clear * SCALES.get(raw, 1)
    if len(clear) != 3:
        return None
    return tuple(sample >> 8 for sample in clear) if "16" in raw or max(clear) > 255 else clear


def _turned(image: Image.Image) -> Image.Image:
    """The picture as its EXIF says; as it is where that cannot be read."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # PIL raises whatever broken tags make it raise
        return image


def _without_alpha(image: Image.Image) -> Image.Image:
    """The picture in RGB: what its alpha channel leaves lies on white."""
    mode = image.mode
    if mode == "I" or mode.startswith("I;"):
        samples = np.asarray(image).astype(np.int64).clip(0, 2**16 - 1) >> 8
        return Image.fromarray(samples.astype(np.uint8)).convert("RGB")
    if mode not in LAYERED:
        return image if mode == "RGB" else image.convert("RGB")
    layered = (image.convert("LA") if mode == "La" else image).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layered.size, WHITE), layered).convert("RGB")


@contextmanager
def _readable(param: str) -> Iterator[None]:
    """Turns what PIL raises into a refusal."""
    try:
        yield
    except InvalidRequest:
        raise
    except Exception as error:  # PIL's plugins raise whatever a broken file makes them raise
        raise InvalidRequest(
            f"'{param}' is no image that can be read; PNG, JPEG, WEBP, GIF and BMP are.",
            param,
            "invalid_image",
        ) from error


def _check_size(image: Image.Image, max_pixels: int, param: str) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise InvalidRequest(
            f"'{param}' has {width} x {height} pixels; at most {max_pixels} are taken.",
            param,
            "invalid_image",
        )
