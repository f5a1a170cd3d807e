"""A quoted mark of a call is content, and a call behind it a call: in a runner and a parser."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from call_walks import Walker, byte_tokenizer, tokens_of
from rayfin.actors.guidance import Thinking
from rayfin.actors.runner.parts.grammars.guided_row import Phase
from rayfin.deployments.guidance.calls import CallRules, build_guidance, make_call_rules
from rayfin.deployments.guidance.tool_choice import ToolChoice
from rayfin.deployments.guidance.tools import Tool
from rayfin.deployments.text.parsing.events import Event, Piece
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.formats import TOOL_FORMATS
from rayfin.deployments.text.parsing.parser import OutputParser
from rayfin.deployments.text.parsing.render import WrittenCall, render_calls

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool("get_weather", WEATHER, path="tools[0]"), Tool("get"))
FUNCTIONS = {tool.name: tool.parameters for tool in TOOLS}
PARIS = WrittenCall("get_weather", {"city": "Paris", "days": 7})
ROWS = {name: row for name, row in TOOL_FORMATS.items() if row.syntax != "channels"}
QUOTES = ["Use the `{}` tag like this.", 'Say "{}" for get_weather, {{not}} {} or\n{}\n[1].']
MARKS = [
    pytest.param(row, mark, id=f"{name}-{mark}")
    for name, row in ROWS.items()
    for mark in (row.begins or ("[",))
]


def call_behind_a_text(row: ToolFormat, calls: Sequence[WrittenCall]) -> str:
    """Calls with the mark that they need there, or "" if the row has none."""
    text = render_calls(row, calls)
    if not row.bare:
        return text
    return "".join((row.openings[0], text, *row.closings[:1])) if row.openings else ""


def read(walker: Walker, row: ToolFormat, tokens: list[int], stream: bool) -> list[Event]:
    """The events of a parser that gets tokens one by one, or all at once."""
    special = {text for text in tokens_of(row) if text in walker.tokenizer.added_ids}
    parser = OutputParser(row, None, functions=FUNCTIONS, special=special)
    marks = {walker.tokenizer.added_ids[mark]: mark for mark in special}
    detokenizer = walker.tokenizer.detokenizer((), skip_special_tokens=False)
    pieces: list[Piece] = []
    for token in tokens:
        if token in marks:
            pieces += [Piece(detokenizer.split(token)), Piece(marker=marks[token])]
        else:
            pieces.append(Piece(detokenizer.push([token])))
    batches = [[piece] for piece in pieces] if stream else [pieces]
    events = [event for batch in batches for event in parser.push(batch)]
    return [*events, *parser.finish("stop")]


def answer_of(events: list[Event]) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and the calls with their arguments."""
    names = {event.index: event.name for event in events if event.kind == "call"}
    texts = dict.fromkeys(names, "")
    for event in events:
        if event.kind == "arguments":
            texts[event.index] += event.text
    content = "".join(event.text for event in events if event.kind == "content")
    return content.strip(), [(name, json.loads(texts[index])) for index, name in names.items()]


def walked(walker: Walker, rules: CallRules, text: str, **kwargs: Any) -> list[tuple[int, Phase]]:
    guidance = build_guidance(grammar=rules.grammar, calls=rules, **kwargs)
    tokens = walker.tokenizer.encode(text, add_special_tokens=False)
    assert guidance is not None
    phases = walker.phases(guidance, tokens)
    assert phases is not None, text
    return list(zip(tokens, phases, strict=True))


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("quote", QUOTES)
@pytest.mark.parametrize(("row", "mark"), MARKS)
def test_a_quoted_mark_is_content_and_a_call_behind_it_is_one(
    row: ToolFormat, mark: str, quote: str, has_tokens: bool
) -> None:
    walker = Walker(byte_tokenizer(tokens_of(row) if has_tokens else []))
    rules = make_call_rules(row, TOOLS, ToolChoice(), walker.tokenizer, guidance="schema")
    prose = quote.format(mark, mark, mark)
    call = call_behind_a_text(row, [PARIS])
    for text in (prose, f"{prose}\n\n{call}"):
        steps = walked(walker, rules, text)
        length = len(walker.tokenizer.encode(prose, add_special_tokens=False))
        assert {phase for _, phase in steps[:length]} == {Phase.FREE}
        assert any(phase is Phase.BOUND for _, phase in steps) is (text != prose and bool(call))
        for stream in (True, False):
            content, calls = answer_of(read(walker, row, [token for token, _ in steps], stream))
            assert content == prose
            assert calls == [(PARIS.name, PARIS.arguments)][: len(text) - len(prose) - 2]


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_a_named_call_behind_a_mark_in_letters_is_held_to_its_schema(row: ToolFormat) -> None:
    walker = Walker(byte_tokenizer())
    rules = make_call_rules(row, TOOLS, ToolChoice(), walker.tokenizer, guidance="schema")
    guidance = build_guidance(calls=rules)
    assert guidance is not None
    for before in ("", "So: "):
        calls = [WrittenCall("get_weather", {"city": "Paris", "wind": 1})]
        text = before + (call_behind_a_text(row, calls) if before else render_calls(row, calls))
        tokens = walker.tokenizer.encode(text, add_special_tokens=False)
        assert (walker.phases(guidance, tokens) is None) is (text != before)


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_one_call_is_the_last(row: ToolFormat) -> None:
    """Text may follow it, and no mark."""
    walker = Walker(byte_tokenizer())
    rules = make_call_rules(row, TOOLS, ToolChoice(parallel=False), walker.tokenizer)
    guidance = build_guidance(calls=rules)
    assert guidance is not None
    call = render_calls(row, [PARIS])
    walked(walker, rules, f"{call}\nThere it is.")
    tokens = walker.tokenizer.encode(f"{call}\n{call}", add_special_tokens=False)
    assert walker.phases(guidance, tokens) is None


@pytest.mark.parametrize("name", ["llama3_json", "xlam", "hermes", "olmo3"])
@pytest.mark.parametrize("ends_at_call", [True, False])
def test_marks_in_letters_within_and_behind_a_thought(name: str, ends_at_call: bool) -> None:
    row = TOOL_FORMATS[name]
    walker = Walker(byte_tokenizer(["<think>", "</think>"]))
    rules = make_call_rules(row, TOOLS, ToolChoice(), walker.tokenizer)
    ids = walker.tokenizer.added_ids
    thinking = Thinking("</think>", (ids["</think>"],), True, ends_at_call=ends_at_call)
    call = render_calls(row, [PARIS])
    steps = walked(walker, rules, f"Hm, {call} it is.</think>\n\n{call}", thinking=thinking)
    close = [token for token, _ in steps].index(ids["</think>"])
    within = {phase for _, phase in steps[:close]}
    assert (Phase.BOUND in within) is (ends_at_call and not row.bare)
    assert any(phase is Phase.BOUND for _, phase in steps[close:])


def test_an_answer_that_does_not_open_its_thought_may_begin_with_a_call() -> None:
    """The first letter is that of both marks."""
    walker = Walker(byte_tokenizer())
    rules = make_call_rules(TOOL_FORMATS["hermes"], TOOLS, ToolChoice(), walker.tokenizer)
    encode = walker.tokenizer.inner.encode
    thinking = Thinking("</think>", tuple(encode("</think>")), False, tuple(encode("<think>")))
    steps = walked(walker, rules, render_calls(TOOL_FORMATS["hermes"], [PARIS]), thinking=thinking)
    assert any(phase is Phase.BOUND for _, phase in steps)
