"""The rules of a thought: made only where a grammar or a budget needs them."""

import pytest

from call_walks import byte_tokenizer, tokens_of
from rayfin.actors.guidance import CallGrammar
from rayfin.deployments.guidance.thinking import call_marks, make_thinking
from rayfin.deployments.text.parsing.format import ReasoningFormat
from rayfin.deployments.text.parsing.formats import REASONING_FORMATS, TOOL_FORMATS

THINK = REASONING_FORMATS["think"]
TOKENIZER = byte_tokenizer(tokens_of(THINK))
CALLS = CallGrammar((9,), "start: /a/")


def test_nothing_depends_on_a_thought_without_a_grammar_or_a_budget() -> None:
    assert make_thinking(THINK, "<think>\n", TOKENIZER) is None
    assert make_thinking(None, "<think>\n", TOKENIZER, budget=3, has_grammar=True) is None


def test_a_thought_about_calls_is_no_call_unless_calls_end_it() -> None:
    assert make_thinking(THINK, "<think>\n", TOKENIZER, free_calls=CALLS) is None
    row = REASONING_FORMATS["deepseek_r1"]
    thinking = make_thinking(row, "<think>\n", TOKENIZER, free_calls=CALLS)
    assert thinking is not None and thinking.starts_inside and not thinking.ends_at_call
    bare = CallGrammar((), "", marks=(("", "start: /a/"),))
    thinking = make_thinking(THINK, "<think>\n", TOKENIZER, free_calls=bare)
    assert thinking is not None and thinking.ends_at_call  # calls begin behind it, too


@pytest.mark.parametrize(
    ("opening", "inside"), [("<|im_start|>assistant\n<think>\n", True), ("assistant\n", False)]
)
def test_an_answer_starts_inside_or_may_open_a_thought(opening: str, inside: bool) -> None:
    thinking = make_thinking(THINK, opening, TOKENIZER, has_grammar=True)
    assert thinking is not None
    assert thinking.starts_inside is inside
    assert thinking.open_ids == (TOKENIZER.added_ids["<think>"],)
    assert (thinking.close, thinking.close_ids) == (
        "</think>",
        (TOKENIZER.added_ids["</think>"],),
    )
    assert thinking.budget is None and thinking.ends_at_call


@pytest.mark.parametrize("opening", ["<think>\n\n</think>\n\n", "<｜Assistant｜></think>"])
def test_a_closed_thought_is_none(opening: str) -> None:
    assert make_thinking(THINK, opening, TOKENIZER, budget=0, has_grammar=True) is None


def test_a_budget_alone_needs_the_marks() -> None:
    thinking = make_thinking(THINK, "", TOKENIZER, budget=0)
    assert thinking is not None and thinking.budget == 0


@pytest.mark.parametrize("row", REASONING_FORMATS.values(), ids=lambda row: row.name)
def test_marks_of_several_tokens_are_spelled(row: ReasoningFormat) -> None:
    for tokenizer in (byte_tokenizer(), byte_tokenizer(tokens_of(row))):
        thinking = make_thinking(row, "", tokenizer, has_grammar=True)
        assert thinking is not None
        assert tokenizer.decode(thinking.close_ids, False) == row.close[0]
        assert tokenizer.decode(thinking.open_ids, False) == row.open[0]


def test_marks_of_calls_that_are_tokens_end_a_thought() -> None:
    kimi = TOOL_FORMATS["kimi_k2"]
    begins = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
    tokenizer = byte_tokenizer([*tokens_of(THINK), *begins])
    marks = call_marks(kimi, THINK, tokenizer)
    assert marks == {mark: tokenizer.added_ids[mark] for mark in begins}
    assert call_marks(kimi, THINK, TOKENIZER) == {}
    assert call_marks(kimi, REASONING_FORMATS["deepseek_r1"], tokenizer) == {}
    assert call_marks(None, THINK, tokenizer) == {}
    ids = tuple(marks.values())
    thinking = make_thinking(THINK, "", tokenizer, has_grammar=True, calls=ids)
    assert thinking is not None and thinking.calls == ids
    thinking = make_thinking(THINK, "", tokenizer, budget=3, calls=ids)
    assert thinking is not None and thinking.calls == ()
