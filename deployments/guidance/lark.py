"""Lark as llguidance reads it: writing parts of it, and the schemas in users' grammars."""

import json
import re

from rayfin.deployments.guidance.json_text import JsonStyle, json_rule
from rayfin.deployments.guidance.schema.lint import check_size, check_text, parse_json_prefix

_PART = re.compile(
    r"""(?P<json>%(?:json|regex|llguidance)(?![a-z]))
    | (?:\#|//)[^\n]*
    | "(?:\\.|[^"\\\n])*"
    | /(?:\\.|[^/\\])+/
    | [^%\#/"]+
    | .""",
    re.VERBOSE | re.DOTALL,
)


def literal(text: str) -> str:
    """A text as a string of Lark, which has no control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """A pattern of Rust's dialect, slashes escaped, as a terminal of Lark."""
    return f"/{pattern}/" if pattern else '""'


def special(token: int) -> str:
    return f"<[{token}]>"


def rewrite_schemas(
    text: str, path: str, style: JsonStyle, max_bytes: int
) -> tuple[str, tuple[str, ...]]:
    """Returns a grammar with its schemas (``%json``) rewritten, and what these do not enforce.

    The rest of the grammar is checked when it compiles.

    Raises:
        InvalidRequest: ``invalid_schema``, ``schema_too_complex``, or what the schemas raise.
    """
    check_size(text, path, max_bytes)
    check_text(text, path)
    kept: list[str] = []
    unenforced: tuple[str, ...] = ()
    at = 0
    while at < len(text):
        found = _PART.match(text, at)
        assert found is not None, "a part is any character"
        part, at = found[0], found.end()
        if found["json"]:
            value, at = parse_json_prefix(text, at, path)
            if part == "%json":
                part, paths = json_rule(value, path, style)
                unenforced += paths
            else:
                part = text[found.start() : at]
        kept.append(part)
    return "".join(kept), unenforced
