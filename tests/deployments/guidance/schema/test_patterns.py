"""Patterns: read as ECMA-262 does, matched as Python's re and as llguidance do."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from byte_matcher import accepts
from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.schema.code_points import ALL, complement, intersects, ranges_of
from rayfin.deployments.guidance.schema.ecma import parse
from rayfin.deployments.guidance.schema.pattern_parts import texts_of, unrolled, write

WRITTEN = [
    ("^a|b$", "^a|b$"),
    ("[a&&b]", r"[\&a-b]"),
    ("[[:alpha:]]", r"[:\[ahlp]\]"),
    ("[+--]", r"[\+-\-]"),
    ("[^]", "(?s:.)"),
    ("a*?b+?", "a*b+"),
    (r"\x41\u0042\u{43}\ud83d\ude00", r"ABC\x{1f600}"),
    (r"\cA\0\t\v", r"\x{1}\x{0}\t\x{b}"),
    (r"^/\d{3}", r"^\/[0-9]{3}"),
    ("x{2,}y{2}z{1}", "x{2,}y{2}z"),
    ("{a}", r"\{a\}"),
    ("(?<n>a)(?P<m>b)(?:c|d)", "ab(?:c|d)"),
    (r"\p{L}[^\p{Lu}x]", r"[\p{L}][^x\p{Lu}]"),
    (".", r"[^\n\r\x{2028}-\x{2029}]"),
    ("[\\w-.]", r"[\--\.0-9A-Z_a-z]"),
    ("", ""),
]
INVALID = [
    "[.*", "a{2,1}", "a**", "(", "a)", "[b-a]", "a\\", "[]", r"\A", r"\q", r"\c", r"\x4", r"\ud800",
    "*a", "{3}", "x{,3}", r"[\ud800]", "(?<n>a",
]  # fmt: skip
UNSUPPORTED = [
    "(?=a)", "(?!a)", "(?<=a)", "(?<!a)", r"\b", r"\B", r"(a)\1", r"(?<n>a)\k<n>", "(?i)a",
    "(?i:a)", "a^b", "a$b", "$^", "(^a)*", "^*", "(?P=n)",
]  # fmt: skip

atoms = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"\d", r"\W", ""])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "*?"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
        inner.map(lambda p: f"({p})"),
    ),
    max_leaves=6,
)
patterns = st.tuples(st.sampled_from(["", "^"]), expressions, st.sampled_from(["", "$"])).map(
    lambda parts: f"{parts[0]}(?:{parts[1]}){parts[2]}"
)
texts = st.text("abc1-", max_size=6)


@pytest.mark.parametrize(("pattern", "written"), WRITTEN)
def test_patterns_are_written_for_the_library(pattern: str, written: str) -> None:
    assert write(parse(pattern, "p")) == written


@pytest.mark.parametrize("pattern", INVALID)
def test_invalid_patterns(pattern: str) -> None:
    _refused(pattern, "invalid_schema")


@pytest.mark.parametrize("pattern", UNSUPPORTED)
def test_what_no_automaton_can_do(pattern: str) -> None:
    _refused(pattern, "unsupported_schema")


@pytest.mark.parametrize(
    "pattern",
    ["(x{1000}){1000}", "x{20001}", "(" * 65 + ")" * 65, "x" * 1025],
)  # fmt: skip
def test_patterns_that_are_too_much(pattern: str) -> None:
    _refused(pattern, "schema_too_complex")


def _refused(pattern: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(pattern, "p.attern")
    assert (caught.value.code, caught.value.param) == (code, "p.attern")


@given(pattern=patterns, samples=st.lists(texts, max_size=8))
def test_matches_are_those_of_llguidance(pattern: str, samples: list[str]) -> None:
    part = parse(pattern, "p")
    schema: dict[str, Any] = {"type": "string", "pattern": write(part)}
    searching = LLMatcher.grammar_from_json_schema(schema)
    whole = f"start: /(?:{write(part, edges=False)})/"
    for text in samples:
        assert accepts(searching, json.dumps(text)) is bool(re.search(pattern, text))
        assert accepts(whole, text) is bool(re.fullmatch(pattern, text))


def test_sizes() -> None:
    assert unrolled(parse("(a{3}b){2}", "p")) == 8


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^(a|bc)$", ["a", "bc"]),
        ("^[ab]x?$", ["a", "ax", "b", "bx"]),
        ("^a{1,2}$", ["a", "aa"]),
        ("^$", [""]),
        ("^(?:a|a)$", ["a"]),
        ("a", None),
        ("^a", None),
        ("^a|b$", None),
        ("^a*$", None),
        ("^[a-z]$", None),
        (r"^\p{L}$", None),
        ("^[a-d]{3}$", None),
    ],
)
def test_texts_of_finite_patterns(pattern: str, texts: list[str] | None) -> None:
    assert texts_of(parse(pattern, "p"), 8) == texts


@given(pattern=patterns, samples=st.lists(texts, max_size=8))
def test_finite_patterns_match_their_texts_alone(pattern: str, samples: list[str]) -> None:
    found = texts_of(parse(pattern, "p"), 64)
    if found is not None:
        assert all(re.search(pattern, text) for text in found)
        assert all((text in found) is bool(re.search(pattern, text)) for text in samples)


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF)).map(sorted)))
def test_complements_share_nothing(pairs: list[tuple[int, int]]) -> None:
    ranges = ranges_of(pairs)
    others = complement(ranges)
    assert not intersects(ranges, others)
    assert ranges_of([*ranges, *others]) == ranges_of(ALL)


@pytest.mark.parametrize("pattern", ["^(a{0}){0,64}$", f"^{'(' * 5}a{{0}}{'){0,7}' * 5}$"])
def test_repetitions_of_nothing_are_one_text(pattern: str) -> None:
    assert texts_of(parse(pattern, "pattern"), 64) == [""]
