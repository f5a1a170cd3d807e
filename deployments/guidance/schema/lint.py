"""Limits of schemas and grammars that are known without compiling them. Each takes microseconds.

llguidance has limits of its own, but none of time and of its stack: these hold where it compiles.

Raises:
    InvalidRequest: ``schema_too_complex``, or ``invalid_schema`` for what is no JSON.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.text.checks import wrong_type

MAX_BYTES = 64 * 1024  # of a schema or a grammar, as the request has it
MAX_DEPTH = 64
MAX_DEFINITIONS = 512
MAX_PROPERTIES = 1000  # of an object
MAX_VALUES = 10_000  # of enum
MAX_LITERAL = 4096  # bytes
MAX_RULES = 2000
MAX_CHOICES = 1000
MAX_GROWTH = 4  # bytes of what is made of a schema, in bytes of the schema's limit

_BLANKS = re.compile(r"[ \t\r\n]*")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


def too_complex(message: str, path: str) -> InvalidRequest:
    return InvalidRequest(message, path, "schema_too_complex")


def invalid_schema(message: str, path: str) -> InvalidRequest:
    return InvalidRequest(message[:300], path, "invalid_schema")


def check_size(text: str, path: str, max_bytes: int) -> None:
    size = len(text) if len(text) > max_bytes else len(text.encode("utf-8", "replace"))
    if size > max_bytes:
        raise too_complex(f"{path} takes at most {max_bytes} bytes, got {size}.", path)


def check_text(text: str, path: str) -> None:
    """Characters that no grammar can have: NUL, and halves of a surrogate pair."""
    if "\0" in text:
        raise invalid_schema(f"{path} holds a NUL.", path)
    if not _is_unicode(text):
        raise invalid_schema(f"{path} holds half of a surrogate pair.", path)


def check_literal(text: str, path: str) -> None:
    if len(text.encode("utf-8", "replace")) > MAX_LITERAL:
        raise too_complex(f"{path} is longer than {MAX_LITERAL} bytes.", path)
    if not _is_unicode(text):
        raise invalid_schema(f"{path} holds half of a surrogate pair.", path)


def parse_json(text: str, path: str, max_bytes: int) -> Any:
    """Returns the JSON value of a text. Its nesting is checked first, because parsers recurse."""
    check_size(text, path, max_bytes)
    value, end = parse_json_prefix(text, 0, path)
    if text[end:].strip():
        raise invalid_schema(f"{path} is no JSON: there is more after its end.", path)
    return value


def parse_json_prefix(text: str, start: int, path: str) -> tuple[Any, int]:
    """Returns the JSON value that begins at a place of a text, and where it ends."""
    depth = 0
    for bracket in _BRACKETS.finditer(text, start):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(bracket[0], 0)
        if depth > MAX_DEPTH:
            raise _too_deep(path)
        if depth <= 0:
            break
    first = _BLANKS.match(text, start)
    try:
        value, end = _DECODER.raw_decode(text, first.end() if first is not None else start)
    except ValueError as e:
        raise invalid_schema(f"{path} is no JSON: {e}.", path) from None
    return value, end


def check_document(document: Any, path: str, max_bytes: int) -> None:
    """Checks that a value is JSON, and how deep and how large it is, without recursion."""
    size = 0
    waiting: list[tuple[Any, int]] = [(document, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise _too_deep(path)
        size += 2
        if isinstance(value, str):
            size += _check_string(value, path)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                if not isinstance(key, str):
                    raise wrong_type("an object with strings as keys", value, path)
                size += _check_string(key, path)
                waiting.append((inner, depth + 1))
        elif isinstance(value, list | tuple):
            waiting.extend((inner, depth + 1) for inner in value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise invalid_schema(f"{path} holds {value}, which is no JSON.", path)
        elif isinstance(value, int) and value.bit_length() > 4096:
            raise too_complex(f"{path} holds a number of more than 1000 digits.", path)
        elif value is not None and not isinstance(value, bool | int | float):
            raise wrong_type("JSON", value, path)
        if size > max_bytes:
            raise too_complex(f"{path} takes at most {max_bytes} bytes.", path)


def check_count(values: int, limit: int, what: str, path: str) -> None:
    if values > limit:
        raise too_complex(f"{path} takes at most {limit} {what}, got {values}.", path)


def _too_deep(path: str) -> InvalidRequest:
    return too_complex(f"{path} nests deeper than {MAX_DEPTH} levels.", path)


def _check_string(text: str, path: str) -> int:
    if not _is_unicode(text):
        raise invalid_schema(f"{path} holds half of a surrogate pair.", path)
    return len(text.encode())


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
