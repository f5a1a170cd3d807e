"""Strings outside of JSON: their constraints as one regular expression."""

import re
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark

from rayfin.deployments.guidance.lark import literal

_FORMATS = {
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
}
_OTHER_FORMATS = {"duration", "email", "hostname", "ipv6", "uri"}
_ANCHORS = re.compile(r"(?:\\.|\[(?:\\.|[^\]\\])*\])|([\^$])|(\|)", re.DOTALL)


def string_terms(schema: Mapping[str, Any]) -> list[str] | None:
    """Returns the terms that a text must match all; [] if it is free, None if they are unknown."""
    terms: list[str] = []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        if not texts:
            return None
        terms.append("(" + " | ".join(map(literal, texts)) + ")")
    if "pattern" in schema:
        pattern = unanchored(str(schema["pattern"]))
        if pattern is None:
            return None
        terms.append(f"/{regex_to_lark(pattern, 'd')}/")
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if low or high is not None:
        terms.append(f"/(?s:.{{{int(low)},{'' if high is None else int(high)}}})/")
    named = schema.get("format")
    if named in _OTHER_FORMATS:
        return None
    if named in _FORMATS:
        terms.append(f"/{regex_to_lark(_FORMATS[named], 'd')}/")
    return terms


def unanchored(pattern: str) -> str | None:
    """Returns a pattern of ECMA, which matches within a text, as one of the whole text.

    None if it has anchors in other places than its ends.
    """
    matches = list(_ANCHORS.finditer(pattern))
    anchors = [match.start() for match in matches if match[1]]
    starts = bool(anchors) and anchors[0] == 0
    ends = bool(anchors) and anchors[-1] == len(pattern) - 1 and pattern[-1] == "$"
    if len(anchors) != starts + ends:
        return None
    if anchors and any(match[2] and not _is_grouped(pattern, match.start()) for match in matches):
        return None
    inner = pattern[starts : len(pattern) - ends]
    before, after = ("" if starts else "(?s:.*)"), ("" if ends else "(?s:.*)")
    return f"{before}({inner}){after}"


def _is_grouped(pattern: str, place: int) -> bool:
    """Whether the alternation at ``place`` stands within a group, so that anchors hold for all."""
    plain = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", lambda match: "x" * len(match[0]), pattern[:place])
    return plain.count("(") > plain.count(")")
