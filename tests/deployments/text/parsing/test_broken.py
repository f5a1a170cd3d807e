"""Answers that are cut, broken, forced, or hold text that looks like marks."""

import json
from typing import Any

import pytest

from rayfin.deployments.text.parsing.events import Event, Piece
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.formats import (
    TOOL_FORMATS,
    find_reasoning_format,
    find_tool_format,
)
from rayfin.deployments.text.parsing.parser import OutputParser
from rayfin.deployments.text.parsing.render import WrittenCall, render_calls
from transcripts import joined

FUNCTIONS = {
    "f": {
        "type": "object",
        "properties": {"s": {"type": "string"}, "n": {"type": "integer"}},
    }
}
CALL = '<tool_call>{"name": "f", "arguments": {"s": "x"}}</tool_call>'
WHOLE = [Event("call", "", 0, "f"), Event("arguments", '{"s": "x"}'), Event("call_end")]


def make(row: str, thinks: str = "", **kwargs: Any) -> OutputParser:
    return OutputParser(
        find_tool_format(row), find_reasoning_format(thinks), functions=FUNCTIONS, **kwargs
    )


def read(parser: OutputParser, text: str, reason: str = "stop") -> list[Event]:
    return [*parser.push([Piece(text)]), *parser.finish(reason)]


def content(text: str) -> Event:
    return Event("content", text)


def began(arguments: str) -> list[Event]:
    """The events of a call that has no end."""
    return [Event("call", "", 0, "f"), Event("arguments", arguments)]


@pytest.mark.parametrize(
    "row, text, events, counts",
    [
        # Nothing was emitted: the text stays as it is.
        ("hermes", '<tool_call>{"name": "f"', [], (0, 1)),
        ("hermes", "<tool_call>\n", [], (0, 1)),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f", [], (0, 1)),
        ("hermes", "Hi <tool_ca", [content("Hi"), content(" <tool_ca")], (0, 0)),
        ("pythonic", "[1, 2", [content("[1, 2")], (0, 0)),
        ("pythonic", "[f(", [], (0, 1)),
        ("llama3_json", '{"name": "f", "par', [], (0, 1)),
        ("llama3_json", '{"name": "g", "par', [content('{"name": "g", "par')], (0, 0)),
        # The pieces of a call that has begun are out.
        ("hermes", CALL.partition("}")[0], began('{"s": "x"'), (0, 1)),
        ("hermes", CALL.partition("}}")[0] + "}", WHOLE, (0, 0)),
        ("qwen3_coder", "<function=f><parameter=s>\nx\n", began('{"s": "x\\n'), (0, 1)),
        ("gemma4", '<|tool_call>call:f{s:<|"|>x<|', began('{"s": "x<|'), (0, 1)),
    ],
)
def test_an_answer_that_is_cut(
    row: str, text: str, events: list[Event], counts: tuple[int, int]
) -> None:
    parser = make(row)
    assert joined(read(parser, text, "length")) == joined(events)
    assert (parser.unparsed, parser.cut) == counts


@pytest.mark.parametrize("row", TOOL_FORMATS.values(), ids=lambda row: row.name)
def test_a_mark_that_is_cut_is_no_content(row: ToolFormat) -> None:
    """From the moment a call has begun, wherever its marks of many tokens are cut."""
    text = render_calls(row, [WrittenCall("f", {"s": "x"}), WrittenCall("f", {"n": 1})])
    ends = 0
    for size in range(len(text)):
        events = read(make(row.name), text[:size], "length")
        if any(event.kind == "call" for event in events):
            ends += any(event.kind == "call_end" for event in events)
            written = "".join(event.text for event in events if event.kind == "content")
            # Behind a message of harmony the beginning of another one may as well be text.
            assert not written or row.separator.startswith(written), text[:size]
    assert ends


@pytest.mark.parametrize(
    "text, events",
    [
        ("Hm.\n</thi", [Event("reasoning", "Hm.")]),
        ("a </b", [Event("reasoning", "a </b")]),
        ("a <", [Event("reasoning", "a <")]),
        ("Hm.</think>Hi.</ans", [Event("reasoning", "Hm."), content("Hi.")]),
        ("Hm.</think><answer>Hi <", [Event("reasoning", "Hm."), content("Hi <")]),
    ],
)
def test_a_thought_or_an_answer_that_is_cut_within_its_mark(text: str, events: list[Event]) -> None:
    parser = make("hermes", "hunyuan_a13b", starts_inside=True)
    assert joined(read(parser, text, "length")) == joined(events)
    parser = make("hermes", "hunyuan_a13b", starts_inside=True)
    whole = "".join(event.text for event in read(parser, text, "stop"))
    assert whole.endswith(text[-2:])  # the model has ended it so


@pytest.mark.parametrize(
    "row, text, events, counts",
    [
        ("hermes", "<tool_call>\n{}</tool_call>.", None, (1, 0)),
        ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>', None, (1, 0)),
        ("hermes", '<tool_call>{"name": "f"', None, (1, 0)),
        ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, (1, 0)),
        ("mistral", "[TOOL_CALLS]g[ARGS]{}", None, (1, 0)),
        ("glm45", "<tool_call>g\n</tool_call>", None, (1, 0)),
        ("pythonic", '[f("x")] Hm.', None, (0, 0)),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"s": oops}}</tool_call> Hm.',
            [*began('{"s": '), content("oops}} Hm.")],
            (0, 1),
        ),
        ("pythonic", "[f(n=oops)] Hm.", [*began('{"n": '), content("oops)] Hm.")], (0, 1)),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=n>\n1\n</parameter>?</function></tool_call>",
            [*began('{"n": 1'), content("?")],
            (0, 1),
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"s": "x"}}}</tool_call>\nHm.',
            [*WHOLE, content("}\nHm.")],
            (0, 0),
        ),
    ],
)
def test_what_is_no_call(
    row: str, text: str, events: list[Event] | None, counts: tuple[int, int]
) -> None:
    parser = make(row)
    found = read(parser, text)
    if events is None:
        assert {event.kind for event in found} == {"content"}
        assert "".join(event.text for event in found) == text
    else:
        assert found == events
    assert (parser.unparsed, parser.cut) == counts


@pytest.mark.parametrize(
    "row, text",
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": %s}</tool_call>'),
        ("mistral_args", "[TOOL_CALLS]f[ARGS]%s"),
        ("llama3_json", '{"name": "f", "parameters": %s}'),
    ],
)
@pytest.mark.parametrize("value", ["{}", " {} ", "null", "[]", '""', '"{}"'])
def test_no_arguments_are_an_empty_object(row: str, text: str, value: str) -> None:
    if row == "mistral_args" and "{}" != value.strip():
        return
    events = read(make(row), text % value)
    assert events == [Event("call", "", 0, "f"), Event("arguments", "{}"), Event("call_end")]


def test_arguments_stay_as_written_but_for_control_characters() -> None:
    written = '{ "s":\t"a\\u00e9\\/é", "n" : 1.50 }'
    events = read(make("hermes"), CALL.replace('{"s": "x"}', f" {written} "))
    assert events[1].text == written
    raw = '<tool_call>{"name": "f", "arguments": {"s": "a\nb\x00"}}</tool_call>'
    assert json.loads(read(make("hermes"), raw)[1].text) == {"s": "a\nb\x00"}


def test_text_that_looks_like_a_special_token_stays_text() -> None:
    parser = make("hermes", "qwen3", special={"<tool_call>", "<think>"})
    events = read(parser, CALL + "<think>")
    assert {event.kind for event in events} == {"content"}
    assert "".join(event.text for event in events) == CALL + "<think>"
    begins = parser = make("hermes", special={"<tool_call>"})
    events = begins.push([Piece(marker="<tool_call>"), Piece(CALL[len("<tool_call>") :])])
    assert events == WHOLE


def test_a_marker_within_a_json_string_is_text() -> None:
    for row, marker in (("hermes", "</tool_call>"), ("gemma4", '<|"|>')):
        begin = make(row).markers
        assert marker in begin
    parser = make("hermes")
    head, _, tail = CALL.partition("x")
    events = parser.push([Piece(head), Piece(marker="</tool_call>"), Piece(tail)])
    assert json.loads("".join(e.text for e in events if e.kind == "arguments")) == {
        "s": "</tool_call>"
    }


def test_unknown_markers_are_text() -> None:
    parser = make("hermes")
    assert parser.push([Piece(marker="<|im_end|>")]) == [content("<|im_end|>")]


@pytest.mark.parametrize(
    "forced, text, reason, events, cut",
    [
        ("required", '[{"name": "f", "parameters": {"s": "x"}}]\n', "stop", WHOLE, 0),
        ("required", '[{"name": "f", "parameters": {"s": "x"}}, {"na', "length", WHOLE, 0),
        ("required", '[{"name": "f", "para', "length", [], 1),
        ("f", '{"s": "x"} ', "stop", WHOLE, 0),
        ("f", '{"s": "x"', "length", began('{"s": "x"'), 1),
        ("f", "No.", "stop", [content("No.")], 0),
        ("f", "", "length", [], 0),
    ],
)
def test_forced_calls_without_a_format(
    forced: str, text: str, reason: str, events: list[Event], cut: int
) -> None:
    parser = make("", forced=forced)
    assert read(parser, text, reason) == events
    assert parser.cut == cut


def test_forced_calls_behind_a_thought() -> None:
    parser = make("", "qwen3", forced="f", starts_inside=True)
    events = read(parser, 'Hm.\n</think>\n\n{"s": "x"}')
    assert events == [Event("reasoning", "Hm."), *WHOLE]
    parser = make("", "qwen3", forced="f", starts_inside=True)
    assert read(parser, "Hm.\n", "length") == [Event("reasoning", "Hm.")]
    assert parser.cut == 0


def test_a_call_within_a_thought_ends_it() -> None:
    parser = make("hermes", "qwen3", starts_inside=True)
    assert parser.in_reasoning
    assert parser.push([Piece("Hm.\n" + CALL)]) == [Event("reasoning", "Hm."), *WHOLE]
    assert not parser.in_reasoning
    parser = make("hermes", "deepseek_r1", starts_inside=True)
    events = read(parser, CALL + "</think>" + CALL)
    assert events == [Event("reasoning", CALL), *WHOLE]
    # Where a grammar follows the thought, marks in letters do not end it: they have no rules.
    parser = make("hermes", "qwen3", starts_inside=True, forced="f", ends_thoughts=())
    events = read(parser, CALL + "</think>" + CALL)
    assert events == [Event("reasoning", CALL), *WHOLE]
    parser = make("hermes", "qwen3", starts_inside=True, ends_thoughts=["<tool_call>"])
    assert read(parser, "Hm.\n" + CALL) == [Event("reasoning", "Hm."), *WHOLE]


def test_blanks_around_calls_are_no_content() -> None:
    events = read(make("hermes"), f"\n\nHi.\n\n{CALL}\n\n\n{CALL}\nBye.\n")
    texts = "".join(event.text for event in events if event.kind == "content")
    assert texts == "\n\nHi.Bye.\n"
    assert [event.index for event in events if event.kind == "call"] == [0, 1]


def test_many_arguments_are_read_once() -> None:
    """The time of a token does not grow with the tokens before it."""
    parser = make("hermes")
    parser.push([Piece(CALL[: CALL.index("x")])])
    for row, piece in (("a", "a"), ("\\n", "\\n"), ("{", "{")):
        assert all(parser.push([Piece(piece)])[0].text == row for _ in range(1000))
    assert len(parser._feed.text) <= 2
