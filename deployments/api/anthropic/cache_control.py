"""``cache_control``: how much of a prompt stays in the prefix cache, and for how long.

All prefixes are cached. A mark pins what is before it, up to the end of its message, for its time
to live. Of several marks the last one counts, since it covers the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rayfin.deployments.api.anthropic.bodies import PromptBody
from rayfin.deployments.text.checks import as_choice, as_object, required

TIMES_TO_LIVE = {"5m": 300.0, "1h": 3600.0}  # seconds
WHOLE = -1  # as a number of messages: all of the prompt


class CacheMark(NamedTuple):
    """The last mark of a body."""

    messages: int  # that it covers, after tools and system; or WHOLE
    seconds: float


def cache_mark(body: PromptBody) -> CacheMark | None:
    """Returns the last mark of a body that is otherwise checked, or None.

    Raises:
        InvalidRequest: a mark is malformed; ``param`` is its path.
    """
    last = None
    for place, path, written in _marks(body):
        mark = as_object(written, path)
        as_choice(required(mark, "type", path), ("ephemeral",), f"{path}.type")
        ttl = mark.get("ttl")
        if ttl is not None:
            as_choice(ttl, tuple(TIMES_TO_LIVE), f"{path}.ttl")
        last = CacheMark(place, TIMES_TO_LIVE[ttl or "5m"])
    return last


def _marks(body: PromptBody) -> Iterator[tuple[int, str, Any]]:
    """Yields (messages covered, path, mark), in the order of the prompt."""
    parts: list[tuple[int, str, object]] = [(0, "tools", body.tools), (0, "system", body.system)]
    messages = body.messages if isinstance(body.messages, Sequence) else ()
    for i, message in enumerate(messages):
        if isinstance(message, Mapping):
            covered = WHOLE if i == len(messages) - 1 else i + 1
            parts.append((covered, f"messages[{i}].content", message.get("content")))
    for covered, path, blocks in parts:
        for j, block in enumerate(blocks if isinstance(blocks, list) else ()):
            if isinstance(block, Mapping) and block.get("cache_control") is not None:
                yield covered, f"{path}[{j}].cache_control", block["cache_control"]
    if body.cache_control is not None:
        yield WHOLE, "cache_control", body.cache_control


def common_length(whole: Sequence[int], part: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for i, (one, other) in enumerate(zip(whole, part, strict=False)):
        if one != other:
            return i
    return min(len(whole), len(part))
