"""Calls that grammars make at random: the parser reads them, and their schema accepts them."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from call_walks import Walker, byte_tokenizer, tokens_of
from rayfin.deployments.guidance.calls import CallRules, make_call_rules
from rayfin.deployments.guidance.tool_choice import ToolChoice
from rayfin.deployments.guidance.tools import Tool
from rayfin.deployments.text.parsing.events import Event, Piece
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.formats import TOOL_FORMATS
from rayfin.deployments.text.parsing.parser import OutputParser
from tiers import few

pytestmark = pytest.mark.slow(reason="walks through grammars for a minute")

WALKS = 12
SCHEMAS: dict[str, dict[str, Any]] = {
    "plain": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer", "minimum": 1, "maximum": 20},
            "share": {"type": "number"},
            "on": {"type": "boolean"},
            "none": {"type": "null"},
        },
        "required": ["text", "on"],
    },
    "words": {
        "properties": {
            "unit": {"enum": ["c", "f g", "</v>"]},
            "code": {"type": "string", "pattern": "^[A-Z]{2,4}[0-9]$"},
            "some": {"type": "string", "minLength": 2, "maxLength": 5},
            "fixed": {"const": 'a "quoted" word'},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["unit", "code", "some", "fixed", "day"],
    },
    "nested": {
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "name": {"type": "string"}},
                "required": ["name"],
                "additionalProperties": False,
            },
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "level": {"anyOf": [{"enum": ["low", "high"]}, {"type": "integer", "minimum": 3}]},
        },
        "required": ["tags", "place", "either", "level"],
    },
    "recursive": {
        "properties": {"tree": {"$ref": "#/$defs/node"}},
        "required": ["tree"],
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    "empty": {"properties": {}},
}
TOOLS = tuple(
    Tool(name, {"type": "object", **schema}, True, f"tools[{i}].function.parameters")
    for i, (name, schema) in enumerate(SCHEMAS.items())
)
FUNCTIONS = {tool.name: tool.parameters for tool in TOOLS}


def events_of(walker: Walker, row: ToolFormat, rules: CallRules, tokens: list[int]) -> list[Event]:
    """What the parser reads, token by token."""
    special = {text for text in tokens_of(row) if text in walker.tokenizer.added_ids}
    parser = OutputParser(row, None, functions=FUNCTIONS, forced=rules.forced, special=special)
    marks = {walker.tokenizer.added_ids[mark]: mark for mark in special}
    detokenizer = walker.tokenizer.detokenizer((), skip_special_tokens=False)
    events: list[Event] = []
    for token in tokens:
        if token in marks:
            pieces = [Piece(detokenizer.split(token)), Piece(marker=marks[token])]
        else:
            pieces = [Piece(detokenizer.push([token]))]
        for piece in pieces:
            events += parser.push([piece])
    return [*events, *parser.push([Piece(detokenizer.finish())]), *parser.finish("stop")]


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    """Names and arguments, all ended; nothing else but blanks is content."""
    names = {event.index: event.name for event in events if event.kind == "call"}
    texts = dict.fromkeys(names, "")
    for event in events:
        if event.kind == "arguments":
            texts[event.index] += event.text
    assert sum(event.kind == "call_end" for event in events) == len(names), events
    beside = "".join(event.text for event in events if event.kind == "content")
    assert not beside.strip(), beside
    return [(name, json.loads(texts[index])) for index, name in names.items()]


@pytest.mark.parametrize(
    ("row", "has_tokens"),
    [
        *(pytest.param(row, True, id=name) for name, row in TOOL_FORMATS.items()),
        *few([(row, False) for row in TOOL_FORMATS.values()], 8),
    ],
)
def test_forced_calls_follow_their_schema(
    row: ToolFormat, has_tokens: bool, depth: Callable[[int], int]
) -> None:
    walker = Walker(byte_tokenizer(tokens_of(row) if has_tokens else []))
    whole = 0
    for tool in TOOLS:
        choice = ToolChoice("required", name=tool.name)
        rules = make_call_rules(row, TOOLS, choice, walker.tokenizer)
        for seed in range(depth(WALKS)):
            tokens = walker.walk(rules.grammar, seed)
            if tokens is None:
                continue
            whole += 1
            calls = calls_of(events_of(walker, row, rules, tokens))
            assert [name for name, _ in calls] == [tool.name]
            jsonschema.validate(calls[0][1], tool.parameters)
    assert whole >= depth(WALKS) * len(TOOLS) / 3


@pytest.mark.parametrize("row", few(TOOL_FORMATS.values(), 12))
def test_required_calls_are_of_known_functions(
    row: ToolFormat, depth: Callable[[int], int]
) -> None:
    walker = Walker(byte_tokenizer(tokens_of(row)))
    rules = make_call_rules(row, TOOLS, ToolChoice("required"), walker.tokenizer)
    several = 0
    for seed in range(depth(3 * WALKS)):
        tokens = walker.walk(rules.grammar, seed)
        if tokens is None:
            continue
        calls = calls_of(events_of(walker, row, rules, tokens))
        assert calls
        several += len(calls) > 1
        for name, arguments in calls:
            jsonschema.validate(arguments, FUNCTIONS[name])
    assert several or row.syntax in ("channels", "tagged")


def test_a_blank_behind_the_token_of_a_mark_is_written() -> None:
    row = TOOL_FORMATS["deepseek_v41"]
    tokenizer = byte_tokenizer(tokens_of(row))
    loose = [Tool(tool.name, tool.parameters) for tool in TOOLS]
    calls = make_call_rules(row, loose, ToolChoice(), tokenizer).calls
    assert calls is not None
    assert calls.grammar.startswith('start: " calls>" ')


@pytest.mark.parametrize("row", few(TOOL_FORMATS.values(), 12))
def test_arguments_of_free_calls_are_objects(row: ToolFormat, depth: Callable[[int], int]) -> None:
    walker = Walker(byte_tokenizer(tokens_of(row)))
    loose = [Tool(tool.name, tool.parameters) for tool in TOOLS]
    rules = make_call_rules(row, loose, ToolChoice(), walker.tokenizer)
    whole = 0
    for seed in range(depth(WALKS)):
        in_text = rules.calls is None or not rules.calls.grammar
        if rules.calls is None:
            tokens = walker.walk(rules.grammar, seed)
        elif in_text:
            marks = rules.calls.marks
            tokens = walker.walk(marks[seed % len(marks)][1], seed)
        else:
            tokens = walker.walk(rules.calls.grammar, seed)
            begins = row.section[0] if not row.call[0] or row.triggers[0] in row.section[0] else ""
            opening = (begins or row.call[0]).partition(row.triggers[0])
            before = walker.tokenizer.encode("".join(opening[:2]), add_special_tokens=False)
            tokens = None if tokens is None else before + tokens
        if tokens is None:
            continue
        events = events_of(walker, row, rules, tokens)
        if in_text:
            events = [event for event in events if event.kind != "content"]
        calls = calls_of(events)
        whole += bool(calls)
        assert all(isinstance(arguments, dict) for _, arguments in calls)
    assert whole or in_text
