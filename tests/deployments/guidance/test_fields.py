"""The fields that ask for a form, as one StructuredOutputs and the path of its grammar."""

import json
from typing import Any

import pytest

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.guidance import CallGrammar, Guidance, Thinking
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.generation.plan import OutputPlan
from rayfin.deployments.guidance import grammar
from rayfin.deployments.guidance.calls import CallRules, build_guidance
from rayfin.deployments.guidance.fields import (
    AnswerFormat,
    asked_format,
    check_size,
    read_response_format,
    read_structured_outputs,
)
from rayfin.deployments.guidance.grammar import answer_grammar, make_grammar
from rayfin.deployments.serve.preflight import DEMO_FOLDER
from rayfin.deployments.text.tokenizer import Tokenizer

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, AnswerFormat(StructuredOutputs(json_object=True), "f")),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            AnswerFormat(StructuredOutputs(json=SCHEMA), "f.json_schema.schema"),
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": False},
            },
            AnswerFormat(StructuredOutputs(json=SCHEMA, strict=False), "f.json_schema.schema"),
        ),
        (
            {"type": "structural_tag", "format": {"type": "any_text"}},
            AnswerFormat(
                StructuredOutputs(
                    structural_tag={"type": "structural_tag", "format": {"type": "any_text"}}
                ),
                "f",
            ),
        ),
    ],
)
def test_response_format(value: Any, expected: AnswerFormat | None) -> None:
    assert read_response_format(value, "f") == expected


def test_a_flat_format() -> None:
    """Of Responses, and of Anthropic, where it has no name."""
    flat = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    expected = AnswerFormat(StructuredOutputs(json=SCHEMA, strict=True), "text.format.schema")
    assert read_response_format(flat, "text.format", flat=True) == expected
    nameless = {"type": "json_schema", "schema": SCHEMA}
    made = read_response_format(nameless, "output_config.format", flat=True, named=False)
    assert made == AnswerFormat(StructuredOutputs(json=SCHEMA), "output_config.format.schema")
    for value, param in [
        (nameless, "text.format.name"),
        ({"type": "structural_tag"}, "text.format.type"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            read_response_format(value, "text.format", flat=True)
        assert caught.value.param == param


def test_options_go_with_the_kind() -> None:
    given = {"json": SCHEMA, "disable_any_whitespace": True, "disable_fallback": False}
    expected = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    assert read_structured_outputs(given, "s") == AnswerFormat(expected, "s.json")
    assert read_structured_outputs(expected, "s") == AnswerFormat(expected, "s.json")
    for name, value in [("disable_any_whitespace", 1), ("whitespace_pattern", [])]:
        with pytest.raises(InvalidRequest) as caught:
            read_structured_outputs({"json": SCHEMA, name: value}, "s")
        assert (caught.value.param, caught.value.code) == (f"s.{name}", "invalid_type")


def test_guided_fields() -> None:
    whitespace = {"guided_whitespace_pattern": " ?"}
    form = asked_format(None, None, {"guided_json": SCHEMA, "guided_regex": None, **whitespace})
    expected = StructuredOutputs(json=SCHEMA, whitespace_pattern=" ?")
    assert form == AnswerFormat(expected, "guided_json")
    form = asked_format({"type": "json_object"}, None, whitespace)
    expected = StructuredOutputs(json_object=True, whitespace_pattern=" ?")
    assert form == AnswerFormat(expected, "response_format")
    for given in (whitespace, {"guided_regex": "a", **whitespace}):
        with pytest.raises(InvalidRequest, match="needs a form that is JSON"):
            asked_format(None, None, given)
    assert asked_format({"type": "text"}, None, {}) is None


def test_text_is_no_second_form() -> None:
    form = asked_format({"type": "text"}, {"regex": "a"}, {})
    assert form == AnswerFormat(StructuredOutputs(regex="a"), "structured_outputs.regex")


@pytest.mark.parametrize(
    "outputs",
    [
        StructuredOutputs(regex="x" * 101),
        StructuredOutputs(regex="é" * 51),
        StructuredOutputs(json="x" * 101),
        StructuredOutputs(choice=["x" * 50, "y" * 50]),
        StructuredOutputs(json={"properties": {f"p{i}": {} for i in range(30)}}),
        StructuredOutputs(json={"const": list(range(101))}),
        StructuredOutputs(structural_tag={"x" * 101: 1}),
    ],
)
def test_forms_that_are_too_long(outputs: StructuredOutputs) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_size(outputs, "here", 100)
    assert (caught.value.param, caught.value.code) == ("here", "schema_too_complex")
    check_size(outputs, "here", 400)


def test_a_deep_schema_is_counted_without_recursion() -> None:
    deep: Any = {}
    for _ in range(10_000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest):
        check_size(StructuredOutputs(json=deep), "here", 2**16)


def test_a_form_that_was_seen_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(str(DEMO_FOLDER))
    schema = {"type": "object", "properties": {"z": {}, "a": {}}, "title": "seen once"}
    form, same = (StructuredOutputs(json=json.loads(json.dumps(schema))) for _ in range(2))
    first = answer_grammar(form, "here", tokenizer)
    assert first == make_grammar(form, "here", special_tokens=tokenizer.added_ids)
    monkeypatch.setattr(grammar, "make_grammar", None)
    assert answer_grammar(same, "here", tokenizer) is first
    for other in (
        StructuredOutputs(json=schema, strict=False),
        StructuredOutputs(json={**schema, "properties": {"a": {}, "z": {}}}),  # another order
    ):
        with pytest.raises(TypeError):
            answer_grammar(other, "here", tokenizer)


def test_what_is_no_json_is_refused() -> None:
    tokenizer = Tokenizer.load(str(DEMO_FOLDER))
    with pytest.raises(InvalidRequest):
        answer_grammar(StructuredOutputs(json={"const": {1, 2}}), "here", tokenizer)


def test_build_guidance() -> None:
    thinking = Thinking("</think>", (7,), True)
    calls = CallRules(calls=CallGrammar((5,), "start: /a/"), forbidden=(9,))
    assert build_guidance() is None
    assert build_guidance(thinking=thinking) is None  # without a budget nothing depends on it
    assert build_guidance(grammar="g", thinking=thinking) == Guidance("g", thinking=thinking)
    assert build_guidance(calls=calls) == Guidance(calls=calls.calls, forbidden=(9,))


def test_what_is_not_enforced_is_named_in_a_header() -> None:
    assert OutputPlan().headers == {}
    paths = ("schema.properties.größe.title", "schema.a,b")
    named = OutputPlan(unenforced=paths).headers["x-rayfin-unenforced"]
    assert named == "schema.properties.gr%C3%B6%C3%9Fe.title, schema.a%2Cb"
    many = OutputPlan(unenforced=("x" * 1000,) * 9).headers["x-rayfin-unenforced"]
    assert len(many) < 4200 and many.endswith(", ...")
