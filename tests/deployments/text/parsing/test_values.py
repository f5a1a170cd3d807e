"""Values of calls: JSON in pieces, Python's literals, and text between tags."""

import ast
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.deployments.text.parsing.events import EventWriter, Piece
from rayfin.deployments.text.parsing.formats import TOOL_FORMATS
from rayfin.deployments.text.parsing.json_text import MAX_DEPTH, JsonText, check_json
from rayfin.deployments.text.parsing.marks import Feed, Markers
from rayfin.deployments.text.parsing.parser import OutputParser
from rayfin.deployments.text.parsing.python_calls import as_number
from rayfin.deployments.text.parsing.tagged_calls import (
    ALL_TYPES,
    to_json,
    types_of_parameter,
)

TEXTS = st.text(max_size=6)
NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
FAST = settings(max_examples=150)


def parses(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@FAST
@given(value=VALUES, indent=st.sampled_from((None, 2)), escaped=st.booleans())
def test_json_is_accepted_as_written(value: Any, indent: int | None, escaped: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escaped)
    assert check_json(text) == text


@FAST
@given(value=VALUES, data=st.data())
def test_what_is_accepted_is_json(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    start = data.draw(st.integers(0, len(text)))
    other = data.draw(st.sampled_from(list('{}[]":,-+.0e1 tn\\u\n\x01x') + [""]))
    broken = text[:start] + other + text[start + data.draw(st.integers(0, 2)) :]
    found = check_json(broken)
    stripped = broken.strip(" \t\r\n")
    if found is None or found == stripped:
        assert parses(stripped) == (found is not None)
    else:
        assert json.loads(stripped, strict=False) == json.loads(found)


@FAST
@given(value=VALUES, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_json_in_pieces(value: Any, cuts: list[int]) -> None:
    text = json.dumps({"a": value}) + " rest"
    reader, out, pos = JsonText(), list[str](), 0
    for end in [*sorted(cuts), len(text)]:
        pos = reader.read(text, pos, max(pos, min(end, len(text))), out)
    assert reader.done and not reader.broken
    assert "".join(out) == text[:pos] == text.removesuffix(" rest")


@FAST
@given(value=VALUES, data=st.data())
def test_following_a_text_is_reading_it(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    start = data.draw(st.integers(0, len(text)))
    other = data.draw(st.sampled_from([*'{}[]":,-.e1 t\\u\n\x01\ud800é', ""]))
    text = text[:start] + other + text[start:]
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))})
    reader, follower = JsonText(), JsonText()
    for begin, end in itertools.pairwise(cuts):
        piece, out = text[begin:end], list[str]()
        reader.read(piece, 0, len(piece), out)
        as_written = "".join(out) == piece and not reader.done
        # Surrogates stand for marker tokens, which only `read` looks up.
        followed = follower.follow(piece)
        assert followed == (as_written and "\ud800" not in piece)
        if not followed:
            follower.read(piece, 0, len(piece), [])
        states = [(one.done, one.broken, one.whole) for one in (reader, follower)]
        assert states[0] == states[1]


def test_depth_is_bounded() -> None:
    assert check_json("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert check_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None


def python_arguments(text: str) -> Any:
    parser = OutputParser(TOOL_FORMATS["pythonic"], None, functions={"f": {}})
    events = [event for char in f"[f(v={text})]" for event in parser.push([Piece(char)])]
    events += parser.finish("stop")
    if events[-1].kind != "call_end":
        return None
    return json.loads("".join(event.text for event in events))["v"]


@FAST
@given(value=VALUES)
def test_python_literals(value: Any) -> None:
    assert python_arguments(repr(value)) == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "text",
    [
        *("'it\\'s'", '"a\\x41\\u0041\\U00000041"', "'''a'b\n\"c'''", '"""a""b"""', '""', "''"),
        *("(1, 2,)", "[1,]", "[[], {}, ()]", "{'a': 1,}", "0x10", "1_000", "+5", ".5", "1e3"),
    ],
)
def test_python_spellings(text: str) -> None:
    assert python_arguments(text) == json.loads(json.dumps(ast.literal_eval(text)))


@pytest.mark.parametrize("text", ["x", "{1: 2}", "{1}", "[1", "1 +", "'a", "f()", "'\\xz1'"])
def test_other_python_is_no_value(text: str) -> None:
    assert python_arguments(text) is None


@pytest.mark.parametrize("text", ["", "nan", "--1", "1.2.3", "0x", "infinity"])
def test_no_numbers(text: str) -> None:
    assert as_number(text) is None


def types(**schema: Any) -> frozenset[str]:
    return types_of_parameter({"properties": {"k": schema}, "$defs": {"t": {"type": "null"}}}, "k")


@pytest.mark.parametrize(
    "schema, expected",
    [
        ({}, ALL_TYPES),
        ({"type": "string"}, {"string"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": [1, None, True]}, {"number", "integer", "null", "boolean"}),
        ({"const": {"a": 1}}, {"object"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/t"}]}, {"string", "null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"enum": ["a"]}]}, {"string"}),
        ({"$ref": "#/$defs/missing"}, ALL_TYPES),
        ({"$ref": "#"}, ALL_TYPES),
        ({"type": 5, "enum": "x", "anyOf": {}, "allOf": 1}, ALL_TYPES),
    ],
)
def test_types_of_a_parameter(schema: dict[str, Any], expected: set[str]) -> None:
    assert types(**schema) == expected


def test_types_without_properties() -> None:
    assert types_of_parameter({}, "k") == ALL_TYPES
    assert types_of_parameter({"properties": []}, "k") == ALL_TYPES
    assert types_of_parameter({"additionalProperties": {"type": "string"}}, "k") == {"string"}


@pytest.mark.parametrize(
    "text, allowed, expected",
    [
        ("12", {"integer"}, "12"),
        ("12", {"string", "null"}, '"12"'),
        ("null", {"string", "null"}, "null"),
        ("12.0", {"integer"}, "12.0"),
        ("12.5", {"integer"}, '"12.5"'),
        ("True", {"boolean"}, "true"),
        ("True", {"boolean", "string"}, '"True"'),
        ("{'a': None}", {"object"}, '{"a": null}'),
        (' {"a": 1} ', {"object"}, '{"a": 1}'),
        ("[1, 2", {"array"}, '"[1, 2"'),
        ("Paris", ALL_TYPES, '"Paris"'),
        ("", {"integer"}, '""'),
        ("1" * 400, {"integer"}, json.dumps("1" * 400)),
    ],
)
def test_text_between_tags(text: str, allowed: set[str], expected: str) -> None:
    assert to_json(text, frozenset(allowed)) == expected


def test_a_feed_gives_back_markers_as_text() -> None:
    feed, writer = Feed(Markers(["<tool>"])), EventWriter({})
    feed.put(feed.markers.encode(Piece(marker="<tool>")) + "a\ud800")
    feed.record()
    feed.take(len(feed.text))
    writer.add("content", feed.release())
    assert writer.drain()[0].text == "<tool>a\ufffd"
