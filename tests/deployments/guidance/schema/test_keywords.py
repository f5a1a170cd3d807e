"""Each keyword of JSON Schema: what is accepted and rejected, or how it is refused.

The answers are walked through llguidance byte by byte, and checked by the package jsonschema.
"""

import json
from typing import Any

import pytest
from jsonschema import validators

from byte_matcher import accepts, compile_error
from keyword_cases import AB, CAT, ENFORCED, REFUSED, REWRITTEN, STRICT, Case, Refusal
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.grammar import Grammar, make_grammar

CASES = [*ENFORCED, *REWRITTEN, *STRICT]
IDS = [case.name for case in CASES]


def made(schema: Any, **options: Any) -> Grammar:
    return make_grammar(StructuredOutputs(json=schema, **options), "schema")


def is_valid(schema: Any, value: Any) -> bool:
    if isinstance(schema, bool):
        return schema
    default = validators.Draft202012Validator
    return validators.validator_for(schema, default=default)(schema).is_valid(value)


def test_the_table_is_as_long_as_it_was() -> None:
    assert len(ENFORCED) >= 64 and len(REFUSED) >= 33 and len(CASES) + len(REFUSED) >= 98
    assert len(set(IDS)) == len(IDS)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_values_are_accepted(case: Case) -> None:
    grammar = made(case.schema).text
    for value in case.accepted:
        assert is_valid(case.schema, value), value
        for layout in ({}, {"indent": 2}, {"separators": (",", ":")}):
            text = json.dumps(value, ensure_ascii=False, **layout)
            assert accepts(grammar, text), text


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_values_are_rejected(case: Case) -> None:
    grammar = made(case.schema).text
    for value in case.rejected:
        assert is_valid(case.schema, value) is (case.verdict in ("strict", "format")), value
        assert not accepts(grammar, json.dumps(value)), value


@pytest.mark.parametrize("case", [case for case in CASES if "names alone" in case.name])
def test_no_answer_needs_a_name_that_there_is_not(case: Case) -> None:
    """A comma behind the last name that a pattern allows leads into an end without an answer."""
    schema = json.loads(made(case.schema).text)["grammars"][0]["json_schema"]
    assert "^(a|b)$" not in json.dumps(schema) and "^a$" not in json.dumps(schema)
    assert {"a"} <= schema["properties"].keys()


@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
def test_keywords_are_refused(case: Refusal) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(case.schema)
    assert (caught.value.code, caught.value.param) == (case.code, f"schema{case.path}")


@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
def test_what_only_narrows_is_left_out_if_asked(case: Refusal) -> None:
    if not case.narrows:
        with pytest.raises(InvalidRequest):
            made(case.schema, strict=False)
        return
    grammar = made(case.schema, strict=False)
    assert f"schema{case.path}" in grammar.unenforced
    assert not compile_error(grammar.text)


def test_what_could_limit_a_value_is_listed() -> None:
    described = {"title": "t", "description": "d", "default": 1, "examples": [1], "$comment": ""}
    schema = {**described, "properties": {"a": {"nullable": True, "format": "color", **described}}}
    assert made(schema).unenforced == (
        "schema.properties.a.nullable",
        "schema.properties.a.format",
    )
    assert made(CAT).unenforced == ()


def test_a_name_cannot_be_escaped_past_its_schema() -> None:
    for schema in (
        {"type": "object", "properties": AB},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        {"properties": AB, "patternProperties": {"^b": {"type": "string"}}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"allOf": [{"properties": AB}, {"additionalProperties": {"type": ["integer", "string"]}}]},
    ):
        assert not accepts(made(schema).text, '{"\\u0061":null}'), schema
        assert not accepts(made(schema).text, '{"\\u0061":[]}'), schema


def test_escapes_stand_for_characters() -> None:
    grammar = made({"type": "string", "maxLength": 1}).text
    for text in ('"\\u00e9"', '"\\ud83d\\ude00"', '"\\n"', '"\\u0001"'):
        assert accepts(grammar, text)
    assert not accepts(grammar, '"\\ud83d"') and not accepts(grammar, '"\\u00e9a"')


def test_options_of_the_library_cannot_be_set() -> None:
    schema = {"x-guidance": {"lenient": True, "whitespace_pattern": "x"}, "type": "array"}
    grammar = made(schema)
    assert grammar.unenforced == ("schema.x-guidance",)
    assert not accepts(grammar.text, "[1,x2]") and accepts(grammar.text, "[1, 2]")


def test_objects_can_be_closed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": True}}}}
    closed = made(schema, disable_additional_properties=True).text
    assert accepts(closed, '{"a":{"b":1}}')
    assert not accepts(closed, '{"c":1}') and not accepts(closed, '{"a":{"c":1}}')
    free = made({"type": "object"}, disable_additional_properties=True).text
    assert accepts(free, '{"c":1}')
