"""Output parsers: transcripts of each format, cuts, broken calls, ends in the middle."""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from rayfin.deployments.text.parsing.events import Event, Piece
from rayfin.deployments.text.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    find_reasoning_format,
    find_tool_format,
)
from rayfin.deployments.text.parsing.parser import OutputParser
from transcripts import FUNCTIONS, PARIS, TRANSCRIPTS, Transcript


class Answer(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, Any]]  # whole ones
    started: int  # calls


def read(events: Iterable[Event]) -> Answer:
    """What events say; asserts their order."""
    texts = {"content": "", "reasoning": ""}
    names: list[str] = []
    arguments: list[str] = []
    calls: list[tuple[str, Any]] = []
    is_open = False
    for event in events:
        if event.kind == "call":
            assert event.index == len(names) and event.name in FUNCTIONS
            names.append(event.name)
            arguments.append("")
            is_open = True
        elif event.kind == "arguments":
            assert is_open and event.text and event.index == len(names) - 1
            arguments[-1] += event.text
        elif event.kind == "call_end":
            assert is_open and event.index == len(names) - 1
            value = json.loads(arguments[-1])
            assert isinstance(value, dict) and arguments[-1].startswith("{")
            calls.append((names[-1], value))
            is_open = False
        else:
            assert event.text
            texts[event.kind] += event.text
            is_open = False
    return Answer(texts["content"], texts["reasoning"], calls, len(names))


def make_parser(case: Transcript, **kwargs: Any) -> OutputParser:
    return OutputParser(
        find_tool_format(case.tools),
        find_reasoning_format(case.thinks),
        functions=FUNCTIONS,
        starts_inside=case.starts_inside,
        **kwargs,
    )


def tokens_of(parser: OutputParser) -> list[str]:
    """The marks that look like tokens of a vocabulary."""
    pattern = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|｜DSML｜")
    return [mark for mark in parser.markers if pattern.fullmatch(mark)]


def as_pieces(text: str, tokens: Collection[str]) -> list[Piece]:
    """A piece for each character and for each of the tokens."""
    pattern = re.compile("(" + "|".join(map(re.escape, tokens)) + ")" if tokens else "(?!)()")
    pieces: list[Piece] = []
    for i, part in enumerate(pattern.split(text)):
        pieces += [Piece(marker=part)] if i % 2 else [Piece(char) for char in part]
    return pieces


def run(parser: OutputParser, pieces: Sequence[Piece], reason: str = "stop") -> list[Event]:
    events = [event for piece in pieces for event in parser.push([piece])]
    return events + parser.finish(reason)


def test_each_row_has_a_transcript() -> None:
    rows = {find_tool_format(case.tools) for case in TRANSCRIPTS}
    assert {row.name for row in rows if row is not None} == set(TOOL_FORMATS)


@pytest.mark.parametrize("case", TRANSCRIPTS, ids=lambda case: f"{case.tools}-{case.thinks}")
@pytest.mark.parametrize("form", ["text", "tokens", "characters", "special"])
def test_transcript(case: Transcript, form: str) -> None:
    parser = make_parser(case)
    tokens = tokens_of(parser) if form in ("tokens", "special") else ()
    if form == "special":
        parser = make_parser(case, special=tokens)
    pieces = [Piece(case.text)] if form == "text" else as_pieces(case.text, tokens)
    answer = read(run(parser, pieces))
    assert answer.calls == list(case.calls)
    assert answer.content == case.content
    assert answer.reasoning == case.reasoning
    assert (parser.unparsed, parser.cut) == (case.unparsed, 0)


THOUGHTS = [name for name, row in REASONING_FORMATS.items() if not row.channels]


@pytest.mark.parametrize("form", ["text", "tokens", "characters", "special"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", THOUGHTS)
def test_a_close_behind_a_thought_that_was_cut_is_no_content(
    name: str, inside: bool, form: str
) -> None:
    """A budget ends the thought, and the model ends it once more."""
    row = REASONING_FORMATS[name]
    text = f"a{row.close[0]}b {row.close[0]}\n\nc"
    text = text if inside else row.open[0] + text

    def parser(**special: Any) -> OutputParser:
        return OutputParser(
            None, row, functions={}, starts_inside=inside, cut_thoughts=True, **special
        )

    tokens = tokens_of(parser()) if form in ("tokens", "special") else ()
    pieces = [Piece(text)] if form == "text" else as_pieces(text, tokens)
    chosen = parser(special=tokens) if form == "special" else parser()
    answer = read(run(chosen, pieces))
    assert (answer.reasoning, answer.content) == ("a", "b \n\nc")


@pytest.mark.parametrize("form", ["text", "tokens", "characters"])
@pytest.mark.parametrize("name", [n for n in THOUGHTS if REASONING_FORMATS[n].ends_at_call])
def test_a_close_behind_a_call_within_a_thought_is_no_content(name: str, form: str) -> None:
    row, tools = REASONING_FORMATS[name], TOOL_FORMATS["hermes"]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    text = f"{row.open[0]}a\n{call}\n{row.close[0]}\n\nc"
    parser = OutputParser(tools, row, functions=FUNCTIONS)
    tokens = tokens_of(parser) if form == "tokens" else ()
    pieces = [Piece(text)] if form == "text" else as_pieces(text, tokens)
    answer = read(run(parser, pieces))
    assert (answer.reasoning, answer.content, answer.calls) == ("a", "c", [PARIS])
