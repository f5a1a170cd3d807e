"""JSON schemas as grammars of their own, and as rules of others."""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.schema.code_points import SPACE, contains, of_text
from rayfin.deployments.guidance.schema.ecma import parse
from rayfin.deployments.guidance.schema.keywords import check_shape
from rayfin.deployments.guidance.schema.lint import (
    MAX_BYTES,
    MAX_GROWTH,
    check_document,
    too_complex,
)
from rayfin.deployments.guidance.schema.pattern_parts import (
    Chars,
    OneOf,
    Part,
    Repeat,
    Sequence,
    write,
)
from rayfin.deployments.guidance.schema.references import References
from rayfin.deployments.guidance.schema.rewrite import Rewriter

WHITESPACE = r"[ ]|\n[ \t]{0,64}"
"""Between the parts of JSON: nothing, a blank, or a line break with its indentation."""

MAX_KNOWN = 256  # schemas that are kept, so that a request with the same one takes no time

_BLANKS = of_text(" \t\n\r")


@dataclass(slots=True, frozen=True)
class JsonStyle:
    """How the JSON of an answer is written, and how strictly its schema is read."""

    whitespace: str | None = WHITESPACE  # None: there is none
    strict: bool = True
    closed: bool = False  # objects take no other properties than those that are listed
    max_bytes: int = MAX_BYTES


@dataclass(slots=True, frozen=True)
class WrittenSchema:
    """A schema with llguidance's options, as JSON."""

    text: str
    unenforced: tuple[str, ...] = ()


def json_style(outputs: StructuredOutputs, path: str, max_bytes: int = MAX_BYTES) -> JsonStyle:
    """The style that ``outputs`` asks for.

    Args:
        path: of ``outputs``.
    """
    whitespace: str | None = WHITESPACE
    if outputs.whitespace_pattern is not None:
        whitespace = _whitespace(outputs.whitespace_pattern, f"{path}.whitespace_pattern")
    if outputs.disable_any_whitespace:
        whitespace = None
    return JsonStyle(
        whitespace, outputs.strict is not False, outputs.disable_additional_properties, max_bytes
    )


def json_text(schema: Any, path: str, style: JsonStyle) -> WrittenSchema:
    """Returns a schema with the same values, as far as they can be enforced.

    Args:
        schema: an object or a boolean.
        path: of the schema in the request, for errors.

    Raises:
        InvalidRequest: ``invalid_schema``, ``unsupported_schema`` or ``schema_too_complex``;
            ``param`` is the path of the keyword.
    """
    check_document(schema, path, style.max_bytes)
    return _compiled(json.dumps(schema, ensure_ascii=False, default=dict), path, style)


@lru_cache(maxsize=MAX_KNOWN)
def _compiled(text: str, path: str, style: JsonStyle) -> WrittenSchema:
    schema = json.loads(text)
    check_shape("not", schema, path)  # an object or a boolean
    rewriter = Rewriter(References(schema, path), strict=style.strict, closed=style.closed)
    rewritten = rewriter.rewrite()
    options: dict[str, Any] = {"json_allow_general_unicode_escapes": True}
    if not rewriter.plain_names:
        options["json_allowed_escapes"] = 'nrbtf\\"'
    if style.whitespace is None:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = style.whitespace
    inside = {"x-guidance": options, **rewritten}
    written = json.dumps(inside, ensure_ascii=False, separators=(",", ":"))
    if len(written) > MAX_GROWTH * style.max_bytes:
        raise too_complex(
            f"{path} takes more than {MAX_GROWTH * style.max_bytes} bytes when it is written out.",
            path,
        )
    return WrittenSchema(written, tuple(dict.fromkeys(rewriter.unenforced)))


def json_rule(schema: Any, path: str, style: JsonStyle) -> tuple[str, tuple[str, ...]]:
    """A schema as a part of a rule of Lark, and the paths of what it does not enforce."""
    written = json_text(schema, path, style)
    return f"%json {written.text}", written.unenforced


def _whitespace(pattern: Any, path: str) -> str:
    if not isinstance(pattern, str):
        raise InvalidRequest(f"{path} must be a string.", path, "invalid_type")
    return write(_blank(parse(pattern, path), path), edges=False)


def _blank(part: Part, path: str) -> Part:
    """The pattern with JSON's whitespace for ``\\s``; other characters would break the JSON."""
    match part:
        case Chars(ranges, properties):
            if ranges == SPACE:
                return Chars(_BLANKS)
            inside = all(
                contains(_BLANKS, point) for low, high in ranges for point in {low, high}
            ) and all(high - low <= 1 for low, high in ranges)
            if properties or not inside:
                raise InvalidRequest(f"{path} may match blanks, tabs and line ends only.", path)
            return part
        case Repeat(inner, least, largest):
            return Repeat(_blank(inner, path), least, largest)
        case Sequence(parts):
            return Sequence(tuple(_blank(p, path) for p in parts))
        case OneOf(parts):
            return OneOf(tuple(_blank(p, path) for p in parts))
        case _:
            return part
