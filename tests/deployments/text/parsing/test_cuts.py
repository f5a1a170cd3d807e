"""Any answer in any pieces: the same events after each prefix, nothing lost, nothing raised."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfin.deployments.text.parsing.events import Event, Piece
from rayfin.deployments.text.parsing.format import ReasoningFormat, ToolFormat
from rayfin.deployments.text.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    find_reasoning_format,
    find_tool_format,
)
from rayfin.deployments.text.parsing.parser import OutputParser
from transcripts import FUNCTIONS, TRANSCRIPTS, Transcript, joined

FRAGMENTS = (
    *('{"name": "get_weather", "arguments": ', '{"city": "Paris"}', '"tool_name": "get_time"'),
    *('{"name": "unknown"', "get_weather", "get_time", "get_weather(", 'city="Paris"', "city"),
    *(
        "functions.get_time:0",
        "call:get_time",
        "'x'",
        '"""',
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ":",
    ),
    *("<", "</", "\\", '"', "'", "=", ">", ";", "\n", "\n\n", " ", "true", "None", "1.5", "-"),
    *("\\u00e9", "\\ud83d", "é", "😀", "words ", "assistant", " to=functions.get_weather", "json"),
)
SETTINGS = settings(
    max_examples=150, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow]
)
Symbols = Sequence[Piece]


def symbols_of(pieces: Iterable[Piece]) -> list[Piece]:
    """A piece for each character and each marker."""
    return [
        symbol
        for piece in pieces
        for symbol in ([piece] if piece.marker else [Piece(char) for char in piece.text])
    ]


def bunched(symbols: Symbols) -> list[Piece]:
    """The symbols with neighbouring text in one piece."""
    result: list[Piece] = []
    for is_marker, group in itertools.groupby(symbols, lambda symbol: bool(symbol.marker)):
        texts = list(group)
        result += texts if is_marker else [Piece("".join(piece.text for piece in texts))]
    return result


def check_cuts(make: Any, symbols: Symbols, cuts: Sequence[int], reason: str) -> list[Event]:
    """Asserts that two parsers say the same after each cut; returns all events."""
    reference, parser = make(), make()
    expected: list[Event] = []
    events: list[Event] = []
    start = 0
    for cut in sorted({min(cut, len(symbols)) for cut in cuts} | {len(symbols)}):
        for symbol in symbols[start:cut]:
            expected += reference.push([symbol])
        events += parser.push(bunched(symbols[start:cut]))
        start = cut
        assert joined(events) == joined(expected)
        assert parser.in_reasoning == reference.in_reasoning
    expected += reference.finish(reason)
    events += parser.finish(reason)
    assert joined(events) == joined(expected)
    assert (parser.unparsed, parser.cut) == (reference.unparsed, reference.cut)
    return events


def check_events(events: Iterable[Event]) -> None:
    """Asserts that calls do not interleave, and that those with an end have whole arguments."""
    arguments = ""
    index, is_open = -1, False
    for event in events:
        if event.kind == "call":
            index, is_open, arguments = index + 1, True, ""
        assert event.index == (index if event.kind in ("call", "arguments", "call_end") else 0)
        if event.kind == "arguments":
            assert is_open
            arguments += event.text
        elif event.kind == "call_end":
            assert is_open and isinstance(json.loads(arguments), dict)
        is_open = is_open and event.kind in ("call", "arguments")


@SETTINGS
@given(data=st.data())
def test_transcripts_in_any_pieces(data: st.DataObject) -> None:
    case: Transcript = data.draw(st.sampled_from(TRANSCRIPTS))

    def make() -> OutputParser:
        return OutputParser(
            find_tool_format(case.tools),
            find_reasoning_format(case.thinks),
            functions=FUNCTIONS,
            starts_inside=case.starts_inside,
        )

    end = data.draw(st.integers(0, len(case.text)))
    text = case.text[: end or None]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    reason = data.draw(st.sampled_from(("stop", "length")))
    check_events(check_cuts(make, symbols_of([Piece(text)]), cuts, reason))


def noise(row: ToolFormat | None, thinks: ReasoningFormat | None) -> st.SearchStrategy[list[Piece]]:
    """Answers of marks, as tokens and as text, and of what stands between them."""
    rows = [each for each in (row, thinks) if each is not None]
    marks = [mark for each in rows for mark in each.marks] or ["<"]
    texts = [case.text for case in TRANSCRIPTS if row and find_tool_format(case.tools) is row]
    symbol = st.one_of(
        st.sampled_from([Piece(marker=mark) for mark in marks]),
        st.sampled_from([Piece(mark) for mark in marks]),
        st.sampled_from([Piece(text) for text in FRAGMENTS]),
        st.sampled_from([Piece(text) for text in texts or FRAGMENTS]),
    )
    return st.lists(symbol, max_size=14)


@pytest.mark.parametrize("name", [*TOOL_FORMATS, ""])
@settings(SETTINGS, max_examples=15)
@given(data=st.data())
def test_noise_in_any_pieces(name: str, data: st.DataObject) -> None:
    row = TOOL_FORMATS.get(name)
    thinks = data.draw(st.sampled_from([None, *REASONING_FORMATS.values()]))
    inside = data.draw(st.booleans())
    forced = data.draw(st.sampled_from(("", "", "required", "get_weather")))
    symbols = symbols_of(data.draw(noise(row, thinks)))
    cuts = data.draw(st.lists(st.integers(0, len(symbols)), max_size=6))
    reason = data.draw(st.sampled_from(("stop", "length", "abort")))

    def make() -> OutputParser:
        return OutputParser(row, thinks, functions=FUNCTIONS, starts_inside=inside, forced=forced)

    check_events(check_cuts(make, symbols, cuts, reason))


@SETTINGS
@given(data=st.data())
def test_without_functions_all_text_is_content(data: st.DataObject) -> None:
    # A frame around the text is dropped, whether there are functions or not.
    rows = [row for row in TOOL_FORMATS.values() if row.syntax != "channels" and not any(row.frame)]
    row = data.draw(st.sampled_from(rows))
    pieces = data.draw(noise(row, None))
    parser = OutputParser(row, None, functions={})
    events = [event for piece in pieces for event in parser.push([piece])]
    events += parser.finish("stop")
    assert {event.kind for event in events} <= {"content"}
    assert "".join(event.text for event in events) == "".join(map("".join, pieces))


@SETTINGS
@given(data=st.data())
def test_what_is_emitted_was_written(data: st.DataObject) -> None:
    """Content and thoughts are parts of the answer, in its order."""
    row = data.draw(st.sampled_from([None, *TOOL_FORMATS.values()]))
    thinks = data.draw(st.sampled_from([None, *REASONING_FORMATS.values()]))
    pieces = data.draw(noise(row, thinks))
    parser = OutputParser(row, thinks, functions=FUNCTIONS)
    events = [*parser.push(pieces), *parser.finish("stop")]
    written = iter("".join(map("".join, pieces)))
    for event in events:
        if event.kind in ("content", "reasoning"):
            assert all(char in written for char in event.text)


def test_held_text_is_bounded() -> None:
    parser = OutputParser(TOOL_FORMATS["hermes"], None, functions=FUNCTIONS)
    events = parser.push([Piece('<tool_call>{"arguments": {"city": "')])
    assert not events
    for _ in range(20):
        events += parser.push([Piece("x" * 100_000)])
    assert parser.unparsed == 1 and len(events) > 1


@pytest.mark.parametrize("depth", [200, 100_000])
def test_deep_arguments_do_no_harm(depth: int) -> None:
    for row, text in _deep(depth).items():
        parser = OutputParser(TOOL_FORMATS[row], None, functions=FUNCTIONS)
        events = [*parser.push([Piece(text)]), *parser.finish("stop")]
        whole = any(event.kind == "call_end" for event in events)
        assert whole == (depth == 200)


def _deep(depth: int) -> Mapping[str, str]:
    value = "[" * depth + "]" * depth
    return {
        "hermes": '<tool_call>{"name": "get_time", "arguments": {"a": ' + value + "}}</tool_call>",
        "pythonic": f"[get_time(a={value})]",
        "gemma4": "<|tool_call>call:get_time{a:" + value + "}<tool_call|>",
    }


LONG = "x" * 509
LONG_ANSWERS = {
    "glm45": "<tool_call>{}<tool_call>get_time</tool_call>",
    "kimi_k2": "<|tool_call_begin|>{}<|tool_call_end|><|tool_call_begin|>get_time{{}}",
    "pythonic": "[{}(a=1), get_time(a={})]",
    "hermes": '<tool_call>{{"{}": 1, "name": "get_time"}}</tool_call>',
    "gemma4": "<|tool_call>call:get_time{{{}}}<|tool_call>call:get_time{{}}<tool_call|>",
    "openai": "<|start|>assistant{}<|message|>text<|end|>",
}


@pytest.mark.parametrize("row", LONG_ANSWERS)
def test_limits_do_not_depend_on_cuts(row: str) -> None:
    """A name or a key that reaches a limit."""
    for length in range(-2, 6):
        word = LONG + "x" * max(length, 0) if length >= -1 else "x" * 255
        for text in (word, " " * 70 + word, word[:-255], word[:-256]):
            symbols = symbols_of([Piece(LONG_ANSWERS[row].format(text, text))])
            check_cuts(
                lambda: OutputParser(TOOL_FORMATS[row], None, functions=FUNCTIONS),
                symbols,
                [300, 500, 530, 540, 600],
                "stop",
            )
