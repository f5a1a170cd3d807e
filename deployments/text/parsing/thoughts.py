"""Which marks of thoughts a template writes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rayfin.deployments.text.chat_template import ThinkingSwitch
from rayfin.deployments.text.parsing.format import ReasoningFormat, ToolFormat
from rayfin.deployments.text.parsing.formats import reasoning_rows
from rayfin.deployments.text.parsing.template_probe import (
    ANSWER,
    FIRST,
    THOUGHT,
    TemplateProbe,
    called,
)
from rayfin.deployments.text.tokenizer import Tokenizer

SWITCHES: tuple[Mapping[str, Any], ...] = (
    {},
    *({name: value} for name in ("enable_thinking", "thinking") for value in (True, False)),
)
"""Template variables that turn thinking on or off."""

_WAYS: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
    ({"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}),
    ({"thinking_mode": "enabled"}, {"thinking_mode": "disabled"}),
    ({"thinking_mode": "thinking"}, {"thinking_mode": "chat"}),
    ({"reasoning_effort": "high"}, {"reasoning_effort": "no_think"}),
)
"""Variables that turn thinking on, and off: all templates get the first ones."""

_THOUGHTS = {"reasoning_content": THOUGHT, "reasoning": THOUGHT, "thinking": THOUGHT}


def find_switch(probe: TemplateProbe) -> ThinkingSwitch:
    """Returns the variables that what the template puts into the model's mouth depends on."""
    for way in _WAYS:
        on, off = map(probe.opening, way)
        if on != off:
            return ThinkingSwitch() if way is _WAYS[0] else ThinkingSwitch(*way)
    return ThinkingSwitch()


class ThoughtsFound(NamedTuple):
    """Rows with the marks of a model's thoughts, and what shows it."""

    rows: list[ReasoningFormat]
    why: str
    history: str = ""  # what the template writes of earlier thoughts

    def best(self, tools: ToolFormat | None) -> ReasoningFormat | None:
        """Of rows with the same marks, the one of the model's family, then the plainest."""
        family = tools.name if tools is not None else ""

        def rank(row: ReasoningFormat) -> tuple[bool, bool]:
            foreign = bool(row.dropped) and not all(mark in self.history for mark in row.dropped)
            return foreign, not (family and family in (row.name, *row.aliases))

        return min(self.rows, key=rank, default=None)


def find_reasoning(tokenizer: Tokenizer, probe: TemplateProbe, suffix: str = "") -> ThoughtsFound:
    """Returns the rows whose marks the template or the vocabulary shows.

    Args:
        suffix: of tags that may have one.
    """
    history = _histories(probe)
    openings = [probe.opening(switch) for switch in SWITCHES]
    prompts = [
        probe.render([], tools=False, generation=True, variables=switch) or ""
        for switch in SWITCHES
    ]
    added = tokenizer.added_ids
    known = reasoning_rows(suffix)
    shows: list[tuple[str, Callable[[ReasoningFormat], bool]]] = [
        ("written in the history", lambda row: any(_holds(row, text) for text in history)),
        ("answers begin with it", lambda row: any(_has(row.open, text) for text in openings)),
        ("cut from the history", lambda row: _is_cut(probe, row)),
        ("prompts ask for it", lambda row: any(_asks(row, text) for text in prompts[1:])),
        ("its marks are tokens", lambda row: _has_tokens(row, added)),
    ]
    for why, is_shown in shows:
        rows = [row for row in known if is_shown(row)]
        if rows:
            return ThoughtsFound(rows, why, "".join(history))
    return ThoughtsFound([], "no marks of thoughts")


def _histories(probe: TemplateProbe) -> list[str]:
    plain = {"role": "assistant", "content": ANSWER, **_THOUGHTS}
    call = {**called([FIRST], False, ""), **_THOUGHTS}
    as_text = {**called([FIRST], True, ""), **_THOUGHTS}
    rendered = (
        probe.render([message], variables=switch)
        for message in (plain, call, as_text)
        for switch in ({}, {"enable_thinking": True, "thinking": True})
    )
    return [text for text in rendered if text is not None and THOUGHT in text]


def _holds(row: ReasoningFormat, text: str) -> bool:
    """Whether the thought stands between the row's marks."""
    before, _, after = text.partition(THOUGHT)
    return before.rstrip().endswith(row.open) and after.lstrip().startswith(row.close)


def _has(marks: tuple[str, ...], text: str) -> bool:
    return any(mark in text for mark in marks)


def _asks(row: ReasoningFormat, text: str) -> bool:
    return _has(row.open, text) and _has(row.close, text)


def _is_cut(probe: TemplateProbe, row: ReasoningFormat) -> bool:
    """Whether a thought within an earlier answer goes, and other text stays."""
    if not row.open or not row.close:
        return False

    def earlier(content: str) -> str:
        turns = [{"role": "assistant", "content": content}, {"role": "user", "content": "So?"}]
        return probe.render(turns, tools=False) or ""

    thought = earlier(f"{row.open[0]}\n{THOUGHT}\n{row.close[0]}\n\n{ANSWER}")
    other = earlier(f"{THOUGHT}\n\n{ANSWER}")
    return THOUGHT not in thought and ANSWER in thought and THOUGHT in other


def _has_tokens(row: ReasoningFormat, added: Mapping[str, int]) -> bool:
    if row.tokens:
        return all(token in added for token in row.tokens)
    return _has(row.open, " ".join(added)) and any(mark in added for mark in row.close)
