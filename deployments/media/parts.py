"""Which parts of a message are images: the forms of OpenAI's two APIs and of Anthropic's."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.text.messages import PlacedPart

DATA = "data:"


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image as sent: bytes, base64, an address, or a picture of Python's (``LLM``)."""

    param: str  # its path, for errors
    data: bytes | None = None
    encoded: str | None = None  # in base64, which takes a millisecond for each megabyte
    url: str | None = None
    picture: Any = None

    @property
    def size(self) -> int:
        """Bytes of its file, as far as they are here."""
        if self.encoded is not None:
            return 3 * len(self.encoded) // 4
        return 0 if self.data is None else len(self.data)

    def file(self) -> bytes:
        """Its file's bytes; not for the event loop.

        Raises:
            InvalidRequest: not in base64, or empty.
        """
        if self.data is not None:
            return self.data
        try:
            data = base64.b64decode(self.encoded or "", validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if not data:
            raise InvalidRequest(
                f"'{self.param}' holds no image in base64.", self.param, "invalid_image"
            )
        return data


def read_part(part: Mapping[str, Any], path: str) -> ImagePart:
    """Returns an image's base64 or address.

    Raises:
        InvalidRequest: the part has none, or not in a form that is known.
    """
    kind = part["type"]
    path = part.path if isinstance(part, PlacedPart) else path
    if kind == "image_pil":
        return ImagePart(path, picture=part.get("image_pil"))
    if kind == "image" and isinstance(part.get("source"), Mapping):
        return _source(part["source"], f"{path}.source")
    if kind == "image" and "image" in part:  # as transformers' templates have it
        return _address(part["image"], f"{path}.image")
    where, value = f"{path}.image_url", part.get("image_url")
    if kind == "input_image" and part.get("file_id") is not None:
        raise InvalidRequest(
            "Images by file_id are not supported; send image_url.",
            f"{path}.file_id",
            "unsupported_content",
        )
    if isinstance(value, Mapping):
        where, value = f"{where}.url", value.get("url")
    return _address(value, where)


def _address(value: object, path: str) -> ImagePart:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"'{path}' must be the address of an image.", path, "invalid_type")
    if not value[: len(DATA)].lower() == DATA:
        return ImagePart(path, url=value)
    head, comma, written = value.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest(f"'{path}' must be a data: address in base64.", path, "invalid_image")
    return ImagePart(path, encoded=written)


def _source(source: Mapping[str, Any], path: str) -> ImagePart:
    """Anthropic's source of an image."""
    if source.get("type") == "base64":
        written = source.get("data")
        if not isinstance(written, str):
            raise InvalidRequest(f"'{path}.data' must be a string.", f"{path}.data", "invalid_type")
        return ImagePart(f"{path}.data", encoded=written)
    if source.get("type") == "url":
        return _address(source.get("url"), f"{path}.url")
    raise InvalidRequest(
        "The source of an image is base64 or url.", f"{path}.type", "unsupported_content"
    )
