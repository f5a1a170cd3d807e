"""The rules for a model's thoughts."""

from collections.abc import Iterable

from rayfin.actors.guidance import CallGrammar, Thinking
from rayfin.deployments.text.parsing.format import (
    ReasoningFormat,
    ToolFormat,
    closed,
    thought_start,
)
from rayfin.deployments.text.tokenizer import Tokenizer


def make_thinking(
    reasoning: ReasoningFormat | None,
    opening: str,
    tokenizer: Tokenizer,
    *,
    budget: int | None = None,
    has_grammar: bool = False,
    free_calls: CallGrammar | None = None,
    calls: Iterable[int] = (),
) -> Thinking | None:
    """Returns the rules of a thought, or None if nothing of the request depends on it.

    Args:
        opening: what the template puts into the model's mouth.
        budget: tokens of a thought; None is no limit.
        has_grammar: the whole answer has one, which begins after the thought.
        free_calls: those of an answer that is free otherwise.
        calls: ids of the marks of calls that may end a thought and begin that grammar.
    """
    if reasoning is None or not reasoning.close:
        return None
    # Within a thought no mark begins a call, or none that needs the start of an answer does.
    at_start = free_calls is not None and any(not mark for mark, _ in free_calls.marks)
    apart = at_start or (free_calls is not None and not reasoning.ends_at_call)
    if budget is None and not has_grammar and not apart:
        return None
    if closed(reasoning, opening):  # templates close a thought that is switched off
        return None
    close = reasoning.close[0]
    first = reasoning.open[0] if reasoning.open else ""
    return Thinking(
        close=close,
        close_ids=tuple(tokenizer.encode(close, add_special_tokens=False)),
        starts_inside=thought_start(reasoning, opening),
        open_ids=tuple(tokenizer.encode(first, add_special_tokens=False)) if first else (),
        budget=budget,
        ends_at_call=reasoning.ends_at_call,
        calls=tuple(calls) if has_grammar else (),
    )


def call_marks(
    tools: ToolFormat | None, reasoning: ReasoningFormat | None, tokenizer: Tokenizer
) -> dict[str, int]:
    """Returns the marks of calls, and their ids, that end a thought where a grammar follows it.

    A mark in letters does not: the grammar begins with a token there.
    """
    if tools is None or reasoning is None or not reasoning.ends_at_call:
        return {}
    added = tokenizer.added_ids
    return {mark: added[mark] for mark in tools.begins if mark in added}
