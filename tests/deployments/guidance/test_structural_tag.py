"""Structural tags: vLLM's form and the tree of formats."""

import json
from typing import Any

import pytest

from byte_matcher import MARKS, accepts, walk
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.grammar import Grammar, make_grammar

INT = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text"}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def seq(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


A, B = tag("<f=a>", INT, "</f>"), tag("<f=b>", const("yes"), "</f>")
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [A, B]}
LIST = {"type": "tags_with_separator", "separator": ",", "tags": [A, B]}
TOOLS = {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [tag("<tool>n", INT, "</tool>")]}

CASES = [
    ("const_string", const('a"\n'), ['a"\n'], ["a"]),
    ("json_schema", INT, ["12"], ["x"]),
    ("json_schema true", {"type": "json_schema", "json_schema": True}, ["[1]"], ["x"]),
    ("regex", {"type": "regex", "pattern": "[a-z]+/"}, ["ab/"], ["ab", "/"]),
    ("grammar", {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["((x))"], ["("]),
    ("grammar of Lark", {"type": "grammar", "grammar": "start: /[0-9]+/"}, ["12"], ["x"]),
    ("any_text", TEXT, ["", "a\nb<f=a>"], []),
    ("any_text without", {"type": "any_text", "excludes": ["bad", "b/"]}, ["ba d"], ["a bad"]),
    ("token", {"type": "token", "token": "<tool>"}, ["<tool>"], ["x"]),
    ("token by id", {"type": "token", "token": 258}, ["</tool>"], ["<tool>"]),
    ("sequence", seq(const("a"), INT, const("b")), ["a1b"], ["a1", "ab"]),
    ("text, then a constant", seq(TEXT, const("END"), INT), ["END1", "xENEND3"], ["xEND", "1"]),
    ("text, then a tag", seq(TEXT, A, const(".")), ["x<f=a>1</f>.", "<f=a>1</f>."], ["x", "x."]),
    ("text in the end", seq(const("a"), TEXT), ["a", "abc"], ["b"]),
    ("or", {"type": "or", "elements": [INT, const("no")]}, ["1", "no"], ["yes"]),
    ("or of texts", tag("(", {"type": "or", "elements": [INT, TEXT]}, ")"), ["(1)", "(x)"], ["(1"]),
    ("optional", seq({"type": "optional", "content": const("a")}, const("b")), ["ab", "b"], ["a"]),
    ("star", {"type": "star", "content": const("ab")}, ["", "abab"], ["a"]),
    ("plus", {"type": "plus", "content": const("ab")}, ["ab", "abab"], [""]),
    ("tag", A, ["<f=a>1</f>"], ["<f=a>x</f>", "<f=a>1", "1"]),
    ("tag of text", tag("<t>", TEXT, "</t>"), ["<t></t>", "<t>a</ b</t>"], ["<t>a", "<t></t>x"]),
    ("tag of several ends", seq(tag("<", TEXT, [">", "/>"]), INT), ["<a>1", "<a/>1"], ["<a1"]),
    ("tag without an end", tag("x", INT, ""), ["x1"], ["x"]),
    ("tag of a regex", tag("<", {"type": "regex", "pattern": ".*"}, ">"), ["<ab>"], ["<a>b"]),
    ("tag of tokens", tag("<tool>", TEXT, "</tool>"), ["<tool>ab</tool>"], ["<tool>ab"]),
    ("tag of token formats", tag({"type": "token", "token": 257}, INT, {"type": "token",
     "token": "</tool>"}), ["<tool>1</tool>"], ["1"]),
    ("triggered_tags", CALLS, ["", "x", "x<f=a>1</f>y<f=b>yes</f>", "<f"],
     ["<f=c>", "<f=a>x", "<f=a>1"]),
    ("at_least_one", {**CALLS, "at_least_one": True}, ["x<f=a>1</f>y"], ["", "x"]),
    ("stop_after_first", {**CALLS, "stop_after_first": True}, ["x", "x<f=a>1</f>"],
     ["<f=a>1</f>x"]),
    ("exactly one", {**CALLS, "at_least_one": True, "stop_after_first": True}, ["x<f=a>1</f>"],
     ["x", "<f=a>1</f>x"]),
    ("two triggers", {**CALLS, "triggers": ["<f=a", "<f=b"]}, ["<f=a>1</f> <f=b>yes</f>"],
     ["<f=a>yes"]),
    ("a trigger that is a token", TOOLS, ["x<tool>n1</tool>y", "x"], ["<tool>m", "<tool>n1"]),
    ("triggered in a tag", tag("[", CALLS, "]"), ["[x<f=a>1</f>y]", "[]"], ["[x", "[]x"]),
    ("tags_with_separator", LIST, ["", "<f=a>1</f>", "<f=a>1</f>,<f=b>yes</f>"],
     ["x", "<f=a>1</f>,", "<f=a>1</f><f=b>yes</f>"]),
    ("one of them", {**LIST, "at_least_one": True, "stop_after_first": True}, ["<f=a>1</f>"],
     ["", "<f=a>1</f>,<f=a>1</f>"]),
]  # fmt: skip

BAD = [
    ("no format", {"type": "structural_tag"}, "missing_required_parameter", ".format"),
    ("another type", {"type": "x", "format": TEXT}, "invalid_value", ".type"),
    ("an unknown format", {"format": {"type": "x"}}, "invalid_value", ".format.type"),
    ("a format without type", {"format": {}}, "missing_required_parameter", ".format.type"),
    ("a format that is text", {"format": "x"}, "invalid_type", ".format"),
    ("a tag without content", {"format": {"type": "tag", "begin": "a", "end": ""}},
     "missing_required_parameter", ".format.content"),
    ("a tag without end", {"format": {"type": "tag", "begin": "a", "content": TEXT}},
     "missing_required_parameter", ".format.end"),
    ("an unknown token", {"format": {"type": "token", "token": "<x>"}}, "invalid_value",
     ".format.token"),
    ("a schema that is refused", {"format": seq(INT, {"type": "json_schema",
     "json_schema": {"not": {}}})}, "unsupported_schema", ".format.elements[1].json_schema.not"),
    ("a style", {"format": {**INT, "style": "qwen_xml"}}, "invalid_value", ".format.style"),
    ("a bad regex", {"format": {"type": "regex", "pattern": "("}}, "invalid_schema",
     ".format.pattern"),
    ("a bad grammar", {"format": {"type": "grammar", "grammar": "root ::= a"}}, "invalid_schema",
     ".format.grammar"),
    ("no trigger", {"format": {**CALLS, "triggers": ["x"]}}, "invalid_value",
     ".format.tags[0].begin"),
    ("two triggers of one", {"format": {**CALLS, "triggers": ["<", "<f"]}}, "invalid_value",
     ".format.tags[0].begin"),
    ("an empty trigger", {"format": {**CALLS, "triggers": [""]}}, "invalid_value",
     ".format.triggers"),
    ("a flag that is text", {"format": {**CALLS, "at_least_one": "x"}}, "invalid_type",
     ".format.at_least_one"),
    ("a structure without schema", {"structures": [{"begin": "a", "end": ""}], "triggers": ["a"]},
     "missing_required_parameter", ".structures[0].schema"),
    ("structures without triggers", {"structures": [{"begin": "a", "schema": {}, "end": ""}]},
     "missing_required_parameter", ".triggers"),
    ("deep formats", {"format": json.loads('{"type":"star","content":' * 70 + "1" + "}" * 70)},
     "schema_too_complex", ""),
]  # fmt: skip


def made(value: Any) -> Grammar:
    return make_grammar(StructuredOutputs(structural_tag=value), special_tokens=MARKS)


@pytest.mark.parametrize(("format", "accepted", "rejected"), [c[1:] for c in CASES],
                         ids=[c[0] for c in CASES])  # fmt: skip
def test_formats(format: Any, accepted: list[str], rejected: list[str]) -> None:
    grammar = made({"type": "structural_tag", "format": format}).text
    for answer in accepted:
        assert accepts(grammar, answer), answer
    for answer in rejected:
        assert not accepts(grammar, answer), answer


@pytest.mark.parametrize(("value", "code", "path"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_tags(value: Any, code: str, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(value)
    assert (caught.value.code, caught.value.param) == (
        code,
        f"structured_outputs.structural_tag{path}",
    )


def test_the_form_of_vllm() -> None:
    value = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer", "title": "t", "x": 1}, "end": "</f>"},
            {"begin": "<f=b>", "schema": '{"type": "null"}', "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    for form in (value, json.dumps(value)):
        grammar = made(form)
        assert accepts(grammar.text, "hello <f=a>12</f><f=b>null</f>.")
        assert not accepts(grammar.text, "<f=a>null</f>") and not accepts(grammar.text, "<f=c>")
    assert grammar.unenforced == ("structured_outputs.structural_tag.structures[0].schema.x",)
    assert grammar.kind == "structural_tag"


@pytest.mark.parametrize("seed", range(10))
def test_tags_that_are_drawn_are_whole(seed: int) -> None:
    answer = walk(made({"format": {**CALLS, "at_least_one": True}}).text, seed)
    assert answer is None or ("<f=a>" in answer or "<f=b>yes</f>" in answer)
