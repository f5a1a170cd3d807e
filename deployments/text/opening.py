"""What a chat template puts into the model's mouth, after the last message of a conversation."""

from collections.abc import Callable, Sequence
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.text.tokenizer import Tokenizer

Render = Callable[[Sequence[Any], bool], list[int]]
"""Messages, and whether the generation prompt is added, to token ids."""

SHORT = ({"role": "user", "content": "x"},)
MAX_KNOWN = 64  # openings; requests choose the variables that they depend on


def opening_text(
    tokenizer: Tokenizer, ids: list[int], messages: Sequence[Any], render: Render, key: str
) -> str:
    """Returns the text of the generation prompt at the end of ``ids``, a rendered conversation.

    It is the difference that the generation prompt makes. Where ``ids`` end as a short conversation
    does, that is rendered once; only where they do not, ``messages`` are rendered again.

    Args:
        key: what else the rendering depends on: variables, and whether there are tools.
    """
    known = tokenizer.openings.get(key)
    if known is None:
        known = _added(lambda: render(SHORT, True), lambda: render(SHORT, False))
        if len(tokenizer.openings) >= MAX_KNOWN:
            tokenizer.openings.clear()
        tokenizer.openings[key] = known
    if not known or ids[-len(known) :] != known:
        known = _added(lambda: ids, lambda: render(messages, False))
    return tokenizer.decode(known, skip_special_tokens=False)


def _added(whole: Callable[[], list[int]], without: Callable[[], list[int]]) -> list[int]:
    """The ids of ``whole`` after those that both begin with; none if a template refuses."""
    try:
        long, short = whole(), without()
    except InvalidRequest:
        return []
    same = 0
    while same < min(len(long), len(short)) and long[same] == short[same]:
        same += 1
    return long[same:]
