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
from rayfin.deployments.media.decode import decode

PIXELS = 10_000


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


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "RGBA", "LA", "I;16", "YCbCr"])
def test_modes(mode: str) -> None:
    image = blocks("I;16" if mode == "I;16" else mode)
    form = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    picture = decode(encoded(image, form), PIXELS, "m")
    assert picture.mode == "RGB" and picture.size == (20, 10)


def test_sixteen_bits_keep_their_upper_ones() -> None:
    ramp = np.linspace(0, 65535, 200).astype(np.uint16).reshape(10, 20)
    picture = np.array(decode(encoded(Image.fromarray(ramp), "PNG"), PIXELS, "m"))
    assert abs(picture[..., 0].astype(int) - (ramp >> 8).astype(int)).max() <= 1


def test_transparency_is_white() -> None:
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert np.array(decode(encoded(clear, "PNG"), PIXELS, "m")).min() == 255
    indexed = Image.new("P", (4, 4), 0)
    assert np.array(decode(encoded(indexed, "PNG", transparency=0), PIXELS, "m")).min() == 255


def test_exif_turns_and_one_pixel() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(blocks(), "JPEG", exif=exif), PIXELS, "m").size == (10, 20)
    assert decode(encoded(blocks(size=(1, 1)), "PNG"), PIXELS, "m").size == (1, 1)


def test_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (5, 5), (value, 0, 0)) for value in (250, 10)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array(decode(data, PIXELS, "m"))[0, 0, 0] > 200


def bomb(width: int, height: int, kind: bytes = b"", body: bytes = b"") -> bytes:
    """A PNG that says it is large, with little behind it, and a further chunk."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + (chunk(kind, body) if kind else b"")
    return start + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


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
