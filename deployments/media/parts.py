"""Images and clips of audio as parts of messages: the forms of OpenAI's two APIs, vLLM's and
Anthropic's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.media.processed import WORDS
from rayfin.deployments.text.checks import from_base64, size_of_base64
from rayfin.deployments.text.messages import PlacedPart

DATA = "data:"
FORMATS = ("wav", "mp3", "flac", "ogg", "m4a", "mp4", "webm")
A: dict[MediaKind, str] = {"image": "an image", "audio": "a clip of audio"}


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image or clip as sent: bytes, base64, an address, or an object of Python's (``LLM``)."""

    param: str  # its path, for errors
    kind: MediaKind = "image"
    data: bytes | None = None
    encoded: str | None = None  # in base64, which takes a millisecond for each megabyte
    url: str | None = None
    given: Any = None  # a picture, or samples and their rate

    @property
    def size(self) -> int:
        """Bytes of its file, as far as they are here."""
        if self.encoded is not None:
            return size_of_base64(self.encoded)
        return 0 if self.data is None else len(self.data)

    def file(self) -> bytes:
        """Its file's bytes; not for the event loop.

        Raises:
            InvalidRequest: not in base64, or empty.
        """
        if self.data is not None:
            return self.data
        try:
            data = from_base64(self.encoded or "")
        except ValueError:
            data = b""
        if not data:
            raise InvalidRequest(
                f"'{self.param}' holds no {WORDS[self.kind][0]} in base64.",
                self.param,
                f"invalid_{self.kind}",
            )
        return data


def read_part(part: Mapping[str, Any], path: str) -> MediaPart:
    """Returns the base64 or address of an image or clip.

    Raises:
        InvalidRequest: the part has none, or not in a form that is known.
    """
    kind = part["type"]
    path = part.path if isinstance(part, PlacedPart) else path
    if kind == "input_audio":
        return _input_audio(part.get("input_audio"), f"{path}.input_audio")
    if kind == "audio_url":
        return _address_of(part.get("audio_url"), f"{path}.audio_url", "audio")
    if kind == "image_pil":
        return MediaPart(path, given=part.get("image_pil"))
    if kind == "image" and isinstance(part.get("source"), Mapping):
        return _source(part["source"], f"{path}.source")
    if kind == "image" and "image" in part:  # as transformers' templates have it
        return _address(part["image"], f"{path}.image")
    if kind == "input_image" and part.get("file_id") is not None:
        raise InvalidRequest(
            "Images by file_id are not supported; send image_url.",
            f"{path}.file_id",
            "unsupported_content",
        )
    return _address_of(part.get("image_url"), f"{path}.image_url")


def _address_of(value: object, path: str, kind: MediaKind = "image") -> MediaPart:
    """An address, or an object that has it as its url."""
    if isinstance(value, Mapping):
        path, value = f"{path}.url", value.get("url")
    return _address(value, path, kind)


def _address(value: object, path: str, kind: MediaKind = "image") -> MediaPart:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"'{path}' must be the address of {A[kind]}.", path, "invalid_type")
    if not value[: len(DATA)].lower() == DATA:
        return MediaPart(path, kind, url=value)
    head, comma, written = value.partition(",")
    if not comma or head.rpartition(";")[2].strip().lower() != "base64":
        raise InvalidRequest(
            f"'{path}' must be a data: address in base64.", path, f"invalid_{kind}"
        )
    return MediaPart(path, kind, encoded=unquote(written) if "%" in written else written)


def _input_audio(value: object, path: str) -> MediaPart:
    """OpenAI's base64 and its format; the file itself says how it is decoded."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"'{path}' must be an object.", path, "invalid_type")
    form, data = value.get("format"), value.get("data")
    if form is not None and form not in FORMATS:
        raise InvalidRequest(
            f"'{path}.format' must be one of {', '.join(FORMATS)}.",
            f"{path}.format",
            "unsupported_content",
        )
    if not isinstance(data, str):
        raise InvalidRequest(f"'{path}.data' must be a string.", f"{path}.data", "invalid_type")
    return MediaPart(f"{path}.data", "audio", encoded=data)


def _source(source: Mapping[str, Any], path: str) -> MediaPart:
    """Anthropic's source of an image."""
    if source.get("type") == "base64":
        written = source.get("data")
        if not isinstance(written, str):
            raise InvalidRequest(f"'{path}.data' must be a string.", f"{path}.data", "invalid_type")
        return MediaPart(f"{path}.data", encoded=written)
    if source.get("type") == "url":
        return _address(source.get("url"), f"{path}.url")
    raise InvalidRequest(
        "The source of an image is base64 or url.", f"{path}.type", "unsupported_content"
    )
