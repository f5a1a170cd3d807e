"""Bytes to pictures: what is turned, filled and refused."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.media.decode import Pictures, decode
from rayfin.deployments.media.settings import MediaSettings

PIXELS = 10_000
PICTURES = Pictures(MediaSettings())


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def blocks(mode: str = "RGB", size: tuple[int, int] = (20, 10)) -> Image.Image:
    drawn = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(drawn, "RGB").convert(mode)


@pytest.mark.parametrize("form", ["PNG", "BMP", "WEBP"])
def test_formats(form: str) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    picture = decode(encoded(blocks(), form, **options), PIXELS, "m")
    assert picture.mode == "RGB" and np.array_equal(np.array(picture), np.array(blocks()))


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(depth: int, kind: int, row: bytes, *others: bytes, size: tuple[int, int] = (2, 1)) -> bytes:
    """A PNG of one row, with other chunks before it."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, depth, kind, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(others) + body + chunk(b"IEND", b"")


def clear(*samples: int) -> bytes:
    return chunk(b"tRNS", struct.pack(f">{len(samples)}H", *samples))


GREY, RGB, INDEXED, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6  # of PNG
WHITE, RED, PINK = [255, 255, 255], [255, 0, 0], [255, 127, 127]
PALETTE = chunk(b"PLTE", bytes([255, 0, 0, 0, 0, 255]))
FILES: dict[str, tuple[bytes, list[list[int]]]] = {  # two pixels, and what they are in RGB
    "rgb": (png(8, RGB, b"\xff\0\0\0\0\xff", clear(255, 0, 0)), [WHITE, [0, 0, 255]]),
    "rgb, near it": (png(8, RGB, b"\xff\0\0\xff\0\1", clear(255, 0, 1)), [RED, WHITE]),
    "rgb of 16 bits": (
        png(16, RGB, bytes([255, 7, 0, 0, 0, 0, 0, 0, 255, 9, 0, 0]), clear(0xFF07, 0, 0)),
        [WHITE, [0, 255, 0]],
    ),
    "dark rgb of 16 bits": (
        png(16, RGB, bytes([0, 7, 0, 0, 0, 0, 7, 0, 7, 0, 7, 0]), clear(7, 0, 0)),
        [WHITE, [7, 7, 7]],
    ),
    "grey of 1 bit": (png(1, GREY, b"\x80", clear(0)), [WHITE, WHITE]),
    "white of 1 bit": (png(1, GREY, b"\x80", clear(1)), [WHITE, [0] * 3]),
    "grey of 2 bits": (png(2, GREY, b"\x60", clear(1)), [WHITE, [170] * 3]),
    "grey of 4 bits": (png(4, GREY, b"\x21", clear(2)), [WHITE, [17] * 3]),
    "grey": (png(8, GREY, b"\x21\x22", clear(0x21)), [WHITE, [0x22] * 3]),
    "grey of 16 bits": (png(16, GREY, b"\x80\1\x80\2", clear(0x8001)), [WHITE, [0x80] * 3]),
    "opaque grey of 16 bits": (png(16, GREY, b"\x40\0\xff\xff"), [[64] * 3, WHITE]),
    "grey and alpha": (png(8, GREY_ALPHA, b"\0\0\x21\xff"), [WHITE, [0x21] * 3]),
    "grey and alpha of 16 bits": (
        png(16, GREY_ALPHA, b"\0\0\0\0\x21\0\xff\xff"),
        [WHITE, [0x21] * 3],
    ),
    "rgb and alpha": (png(8, RGB_ALPHA, b"\xff\0\0\x80\xff\0\0\xff"), [PINK, RED]),
    "palette": (png(8, INDEXED, b"\0\1", PALETTE), [RED, [0, 0, 255]]),
    "clear in a palette": (
        png(1, INDEXED, b"\x40", PALETTE, chunk(b"tRNS", b"\0")),
        [WHITE, [0, 0, 255]],
    ),
    "half clear in a palette": (
        png(8, INDEXED, b"\0\1", PALETTE, chunk(b"tRNS", b"\x80\0")),
        [PINK, WHITE],
    ),
}


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("name", FILES)
def test_what_is_transparent_is_white(name: str) -> None:
    """A file, and the same file as a picture of PIL's."""
    data, pixels = FILES[name]
    for picture in (decode(data, PIXELS, "m"), PICTURES.given(opened(data), "m")):
        assert picture.mode == "RGB"
        assert np.abs(np.array(picture)[0].astype(int) - pixels).max() <= 1, np.array(picture)


def layered(mode: str) -> Image.Image:
    """A clear pixel and a red one (grey 76 where there are no colours)."""
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (255, 0, 0, 255))
    return image.convert("LA").convert(mode) if mode == "La" else image.convert(mode)


def indexed_with_alpha() -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([9, 9, 9, 0, 255, 0, 0, 255], "RGBA")
    image.putpixel((1, 0), 1)
    return image


RAMP = np.array([[0x4000, 0xFF00]])
PICTURES_OF_PIL: dict[str, tuple[Image.Image, list[list[int]]]] = {
    **{mode: (layered(mode), [WHITE, RED]) for mode in ("RGBA", "RGBa", "PA")},
    **{mode: (layered(mode), [WHITE, [76] * 3]) for mode in ("LA", "La")},
    "P, its palette with alpha": (indexed_with_alpha(), [WHITE, RED]),
    **{
        f"{mode}, opaque": (Image.new("RGB", (2, 1), "red").convert(mode), [RED, RED])
        for mode in ("RGBX", "CMYK", "YCbCr", "HSV", "LAB", "P")
    },
    "1": (Image.new("1", (2, 1), 1), [WHITE, WHITE]),
    "I;16": (Image.fromarray(RAMP.astype(np.uint16)), [[64] * 3, WHITE]),
    "I;16B": (Image.frombytes("I;16B", (2, 1), b"\x40\0\xff\0"), [[64] * 3, WHITE]),
    "I": (Image.fromarray(RAMP.astype(np.int32)), [[64] * 3, WHITE]),
    "I, beyond 16 bits": (Image.fromarray((RAMP * [-1, 9]).astype(np.int32)), [[0] * 3, WHITE]),
    "F": (Image.fromarray(np.array([[64, 999]], np.float32)), [[64] * 3, WHITE]),
}


@pytest.mark.parametrize("name", PICTURES_OF_PIL)
def test_modes_of_pil(name: str) -> None:
    image, pixels = PICTURES_OF_PIL[name]
    before = image.tobytes()
    picture = PICTURES.given(image, "m")
    assert picture.mode == "RGB" and image.tobytes() == before
    assert np.abs(np.array(picture)[0].astype(int) - pixels).max() <= 6, np.array(picture)


@pytest.mark.parametrize("form", ["WEBP", "GIF", "APNG", "JPEG"])
def test_other_formats(form: str) -> None:
    """The first frame is what counts; Adobe's JPEGs have CMYK inverted."""
    first, later = layered("RGBA").resize((16, 16), 0), Image.new("RGBA", (16, 16), (0, 0, 255, 9))
    options: dict[str, Any] = {"save_all": True, "append_images": [later], "lossless": True}
    expected = np.array([WHITE] * 8 + [RED] * 8)
    if form == "JPEG":
        first, options = Image.new("CMYK", (16, 16), (0, 255, 255, 0)), {"quality": 95}
        expected = np.array([RED])
    data = encoded(first, form.removeprefix("A"), **options)
    for picture in (decode(data, PIXELS, "m"), PICTURES.given(opened(data), "m")):
        assert np.abs(np.array(picture).astype(int) - expected).max() <= 6


ARRAYS: dict[str, tuple[np.ndarray[Any, Any], list[list[int]]]] = {
    "rgb": (np.array([[RED, WHITE]], np.uint8), [RED, WHITE]),
    "channels first": (np.array([[RED, WHITE]], np.uint8).transpose(2, 0, 1), [RED, WHITE]),
    "alpha": (np.array([[[0] * 4, [*RED, 255]]], np.uint8), [WHITE, RED]),
    "grey": (np.array([[9, 200]], np.uint8), [[9] * 3, [200] * 3]),
    "grey with its channel": (np.array([[[9], [200]]], np.uint8), [[9] * 3, [200] * 3]),
    "grey of 16 bits": (RAMP.astype(np.uint16), [[64] * 3, WHITE]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str) -> None:
    array, pixels = ARRAYS[name]
    assert np.array(PICTURES.given(array, "m"))[0].tolist() == pixels


@pytest.mark.parametrize(
    ("given", "code"),
    [
        *((array, "invalid_type") for array in (np.zeros((2, 2)), np.zeros(3, np.uint8))),
        (Image.new("RGB", (0, 3)), "invalid_image"),
        (opened(encoded(blocks(), "PNG")[:-60]), "invalid_image"),
    ],
)
def test_given_pictures_that_are_refused(given: Any, code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        PICTURES.given(given, "m")
    assert (refused.value.code, refused.value.param) == (code, "m")


TURNS: dict[int, Any] = {  # of EXIF, as arrays are turned
    0: lambda a: a,
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a[:, ::-1].swapaxes(0, 1),
}


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L"])
@pytest.mark.parametrize("turn", TURNS)
def test_exif_turns(turn: int, mode: str) -> None:
    """A file, and what PIL opens, has loaded or has copied of it, are the same."""
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(blocks(mode, (3, 2)), "PNG", exif=exif)
    loaded = opened(data)
    loaded.load()
    ways = [decode(data, PIXELS, "m")]
    ways += [PICTURES.given(one, "m") for one in (opened(data), loaded, loaded.copy())]
    expected = TURNS[turn](np.array(blocks(mode, (3, 2)).convert("RGB")))
    for picture in ways:
        assert np.array_equal(np.array(picture), expected)


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "PNG"])
def test_exif_of_formats(form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(blocks(), form, exif=exif), PIXELS, "m").size == (10, 20)
    broken = encoded(blocks(), form, exif=b"Exif\0\0MM\0\x2a\0\0\0\x08\xff")
    assert decode(broken, PIXELS, "m").size == (20, 10)  # it stays as it is


def test_one_pixel() -> None:
    assert decode(encoded(blocks(size=(1, 1)), "PNG"), PIXELS, "m").size == (1, 1)


def bomb(width: int, height: int, kind: bytes = b"", body: bytes = b"") -> bytes:
    """A PNG that says it is large, with little behind it, and a further chunk."""
    others = [chunk(kind, body)] if kind else []
    return png(8, RGB, bytes(999), *others, size=(width, height))


def large_jpeg() -> bytes:
    data = bytearray(encoded(blocks(), "JPEG"))
    at = data.index(b"\xff\xc0") + 5  # height and width behind the start of the frame
    data[at : at + 4] = struct.pack(">HH", 65_500, 65_500)
    return bytes(data)


def large_bmp(width: int, height: int) -> bytes:
    data = bytearray(encoded(blocks(), "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def large_webp() -> bytes:
    """The largest that the format has, and nothing behind its header."""
    side = 16_384 - 1
    body = b"\x2f" + struct.pack("<I", side | side << 14) + bytes(27)
    chunk = b"VP8L" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def large_gif() -> bytes:
    """A frame beyond the screen that the file names."""
    screen = struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 60_000, 60_000, 0) + b"\x02\x02\x4c\x01\x00"
    return b"GIF89a" + screen + frame + b";"


ZEROS = zlib.compress(bytes(10**8))


WRONG = {
    "text": b"hello",
    "nothing": b"",
    "truncated png": encoded(blocks(), "PNG")[:-60],
    "truncated jpeg": encoded(blocks(size=(60, 60)), "JPEG")[:-200],
    "header alone": encoded(blocks(), "PNG")[:20],
    "tiff": encoded(blocks(), "TIFF"),
    "icon": encoded(blocks(size=(16, 16)), "ICO"),
    "pdf": encoded(blocks(), "PDF"),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "too large": encoded(blocks(size=(101, 100)), "PNG"),
    "bomb": bomb(60_000, 60_000),
    "wide bomb": bomb(2**31 - 1, 1),
    "zero": bomb(0, 5),
    "large jpeg": large_jpeg(),
    "large bmp": large_bmp(60_000, 60_000),
    "bmp upside down": large_bmp(60_000, -60_000),
    "large webp": large_webp(),
    "large gif": large_gif(),
    "text in a png": bomb(10, 10, b"zTXt", b"k\0\0" + ZEROS),
    "colors in a png": bomb(10, 10, b"iCCP", b"k\0\0" + ZEROS),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(WRONG[name], PIXELS, "messages[0].content[1]")
    assert refused.value.code == "invalid_image"
    assert refused.value.param == "messages[0].content[1]"


def memory(name: str) -> int:
    """KiB of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux has this file")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_takes_no_memory(name: str) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = memory("VmRSS")
    with pytest.raises(InvalidRequest):
        decode(WRONG[name], PIXELS, "m")
    assert memory("VmHWM") - before < 32 * 2**10
