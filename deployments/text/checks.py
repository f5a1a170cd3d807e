"""Checks of single values in request bodies, with errors that name their path.

Each takes a value and its path (``messages[0].role``) and returns the value with its type.

Raises:
    InvalidRequest: ``param`` is the path.
"""

import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rayfin.actors.errors import InvalidRequest

NAME = re.compile(r"[A-Za-z0-9_.\-]+")
MAX_NAME = 64  # characters, as at OpenAI
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # pairs, and characters of each
TEXT_OR_PARTS = "a string or a list of parts"
BLANKS = b" \t\n\f\r"
STANDARD = bytes.maketrans(b"-_", b"+/")  # the alphabet of base64 for that of URLs


def required(value: Mapping[str, Any], name: str, path: str) -> Any:
    if value.get(name) is None:
        raise missing(f"{path}.{name}")
    return value[name]


def missing(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{path}'.", path, "missing_required_parameter"
    )


def wrong_type(expected: str, value: object, path: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{path}' must be {expected}, got {type(value).__name__}.", path, "invalid_type"
    )


def as_object(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong_type("an object", value, path)
    return value


def as_string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise wrong_type("a string", value, path)
    return value


def as_name(value: object, path: str, longest: int = MAX_NAME) -> str:
    name = as_string(value, path)
    if len(name) > longest or not NAME.fullmatch(name):
        raise InvalidRequest(
            f"'{path}' may hold 1 to {longest} of the characters A-Z a-z 0-9 _ - and dot.", path
        )
    return name


def is_empty(value: object) -> bool:
    """Whether an optional member says nothing: null, or an empty list, object or string."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def as_choice(value: object, choices: Sequence[str], path: str) -> str:
    word = as_string(value, path)
    if word not in choices:
        raise InvalidRequest(
            f"'{path}' must be one of {', '.join(choices)}, got {word[:32]!r}.", path
        )
    return word


def as_list(value: object, path: str, limit: int, expected: str = "a list") -> Sequence[Any]:
    """A list that is not empty; ``expected`` names the types that the caller accepts."""
    if not isinstance(value, list | tuple):
        raise wrong_type(expected, value, path)
    if not value:
        raise InvalidRequest(f"'{path}' must not be empty.", path, "empty_array")
    if len(value) > limit:
        raise InvalidRequest(
            f"'{path}' takes at most {limit} elements, got {len(value)}.",
            path,
            "array_above_max_length",
        )
    return value


def size_of_base64(text: str) -> int:
    """Counts the bytes of what ``from_base64`` returns, without decoding it."""
    blanks = sum(text.count(chr(blank)) for blank in BLANKS)
    return 3 * (len(text) - blanks - text.count("=")) // 4


def from_base64(text: str) -> bytes:
    """Decodes base64 as browsers do: blanks, missing padding and the alphabet of URLs are fine.

    Raises:
        ValueError: another character, or an impossible length.
    """
    written = text.encode("ascii").translate(STANDARD, BLANKS)
    if len(written) % 4 in (2, 3):
        written += b"=" * (4 - len(written) % 4)
    return binascii.a2b_base64(written, strict_mode=True)


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises:
    InvalidRequest: it has too many pairs, or one that is too long.
    """
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata takes at most {MAX_METADATA} pairs, got {len(metadata)}.",
            "metadata",
            "object_above_max_properties",
        )
    for key, value in metadata.items():
        if len(key) > MAX_KEY or len(value) > MAX_VALUE:
            raise InvalidRequest(
                f"A key of metadata has at most {MAX_KEY} characters, a value {MAX_VALUE}.",
                "metadata",
                "string_above_max_length",
            )
