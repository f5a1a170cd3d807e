"""Base64 of images and clips, as lenient as browsers are."""

import base64
import binascii
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.media.parts import read_part
from rayfin.deployments.text.checks import from_base64, size_of_base64

WRITTEN: dict[str, Callable[[bytes], str]] = {
    "standard": lambda raw: base64.b64encode(raw).decode(),
    "lines": lambda raw: base64.encodebytes(raw).decode(),
    "lines of Windows": lambda raw: base64.encodebytes(raw).decode().replace("\n", "\r\n"),
    "blanks": lambda raw: " \t".join(base64.b64encode(raw).decode()) + " \n",
    "no padding": lambda raw: base64.b64encode(raw).decode().rstrip("="),
    "alphabet of URLs": lambda raw: base64.urlsafe_b64encode(raw).decode(),
    "all of them": lambda raw: "\n".join(base64.urlsafe_b64encode(raw).decode().rstrip("=")),
}
PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "image_url": lambda text: {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{text}"},
    },
    "input_image": lambda text: {
        "type": "input_image",
        "image_url": f"DATA:image/png;charset=utf-8; BASE64,{text}",
    },
    "percent": lambda text: {"type": "image", "image": f"data:;base64,{quote(text)}"},
    "source": lambda text: {"type": "image", "source": {"type": "base64", "data": text}},
    "input_audio": lambda text: {"type": "input_audio", "input_audio": {"data": text}},
    "audio_url": lambda text: {"type": "audio_url", "audio_url": f"data:audio/wav;base64,{text}"},
}


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("part", PARTS)
def test_every_form_is_read(form: str, part: str) -> None:
    """Of lengths with each padding; and the bytes are counted as they are."""
    draw = random.Random(7)
    for length in (1, 2, 3, 57, 58, 1000):
        raw = b"\xfb\xff" * (length // 2) + draw.randbytes(length % 2)  # + and / in base64
        read = read_part(PARTS[part](WRITTEN[form](raw)), "messages[0].content[0]")
        assert read.file() == raw and read.size == length


@pytest.mark.parametrize(
    "text", ["*", "A", "AAAAA", "=", "A=AA", "AA=A", "AA==AA==", "é", "AA%", "+"]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises((ValueError, binascii.Error)):
        from_base64(text)
    for make in PARTS.values():
        with pytest.raises(InvalidRequest) as caught:
            read_part(make(text), "p").file()
        assert caught.value.code in ("invalid_image", "invalid_audio")


def test_sizes_are_never_less_than_what_comes_out() -> None:
    draw = random.Random(5)
    for _ in range(300):
        raw = draw.randbytes(draw.randrange(70))
        for form in WRITTEN.values():
            assert size_of_base64(form(raw)) == len(from_base64(form(raw))) == len(raw)
