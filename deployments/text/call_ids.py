"""Ids of tool calls in the styles that models write and their templates insist on."""

import hashlib
import re
import string
from collections.abc import Sequence
from typing import Any

from rayfin.deployments.text.parsing.format import IdStyle

ALPHANUMERIC = string.ascii_letters + string.digits
NINE = re.compile(r"[A-Za-z0-9]{9}")
NUMBERED = re.compile(r"functions\..+:[0-9]+")


def make_call_id(style: IdStyle, seed: str, name: str, number: int) -> str:
    """Returns the id that follows from ``seed``; in the style "kimi" from the name and the number.

    Args:
        name: of the function.
        number: of the call in its conversation, from 0.
    """
    if style == "kimi":
        return f"functions.{name}:{number}"
    digest = hashlib.sha256(seed.encode("utf-8", "surrogatepass")).digest()
    if style == "mistral":
        return "".join(ALPHANUMERIC[byte % len(ALPHANUMERIC)] for byte in digest[:9])
    return f"call_{digest.hex()[:24]}"


def restyle_ids(messages: Sequence[dict[str, Any]], style: IdStyle) -> None:
    """Replaces ids of other styles in plain messages; results keep naming their calls.

    Clients bring ids of other servers, and templates for Mistral and Kimi print or refuse them.
    """
    fits = NUMBERED if style == "kimi" else NINE
    new: dict[str, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            written = call.get("id", "")
            if not fits.fullmatch(written):
                seed = written or f"call {number}"
                call["id"] = make_call_id(style, seed, call["function"]["name"], number)
                new[written] = call["id"]
            number += 1
        if (written := message.get("tool_call_id")) is not None and not fits.fullmatch(written):
            other = make_call_id(style, written, message.get("name", "tool"), max(0, number - 1))
            message["tool_call_id"] = new.get(written, other)
