"""Forms of answers that are no schemas, and requests that ask for none or for too much."""

import json
import time
from types import MappingProxyType
from typing import Any

import pytest

from byte_matcher import accepts, compile_error, vocabulary, walk
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.compile_check import judge
from rayfin.deployments.guidance.fields import KINDS, read_structured_outputs
from rayfin.deployments.guidance.grammar import make_grammar

DEEP: dict[str, Any] = {}
for _ in range(3000):
    DEEP = {"items": DEEP}
OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}

BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("none", {}, "invalid_value", ""),
    ("two kinds", {"regex": "a", "choice": ["a"]}, "invalid_value", ""),
    ("json_object false", {"json_object": False}, "invalid_value", ".json_object"),
    ("json_object text", {"json_object": "yes"}, "invalid_type", ".json_object"),
    ("empty json", {"json": ""}, "invalid_value", ".json"),
    ("blank json", {"json": " \n"}, "invalid_schema", ".json"),
    ("empty grammar", {"grammar": ""}, "invalid_value", ".grammar"),
    ("empty tag", {"structural_tag": {}}, "invalid_value", ".structural_tag"),
    ("empty choice", {"choice": []}, "invalid_value", ".choice"),
    ("empty regex", {"regex": ""}, "invalid_value", ".regex"),
    ("schema a list", {"json": [1]}, "invalid_type", ".json"),
    ("schema a number", {"json": 7}, "invalid_type", ".json"),
    ("schema a text of a list", {"json": "[1]"}, "invalid_schema", ".json"),
    ("schema no JSON", {"json": "{"}, "invalid_schema", ".json"),
    ("schema with NaN", {"json": '{"const": NaN}'}, "invalid_schema", ".json"),
    ("schema with infinity", {"json": {"const": float("inf")}}, "invalid_schema", ".json"),
    ("schema with a set", {"json": {"enum": {1}}}, "invalid_type", ".json"),
    ("schema with numbers as keys", {"json": {"properties": {1: {}}}}, "invalid_type", ".json"),
    ("regex an object", {"regex": {}}, "invalid_type", ".regex"),
    ("choice of numbers", {"choice": ["a", 1]}, "invalid_type", ".choice[1]"),
    ("choice a text", {"choice": "ab"}, "invalid_type", ".choice"),
    ("choice with NUL", {"choice": ["a\0"]}, "invalid_schema", ".choice[0]"),
    ("a property a text", {"json": {"properties": {"a": "x"}}}, "invalid_schema",
     ".json.properties.a"),
    ("required a text", {"json": {"required": "a"}}, "invalid_schema", ".json.required"),
    ("required with numbers", {"json": {"required": ["a", 1]}}, "invalid_schema",
     ".json.required[1]"),
    ("type strng", {"json": {"items": {"type": "strng"}}}, "invalid_schema", ".json.items.type"),
    ("type empty", {"json": {"type": []}}, "invalid_schema", ".json.type"),
    ("anyOf empty", {"json": {"anyOf": []}}, "invalid_schema", ".json.anyOf"),
    ("anyOf of texts", {"json": {"anyOf": [{}, "a"]}}, "invalid_schema", ".json.anyOf[1]"),
    ("minLength negative", {"json": {"minLength": -1}}, "invalid_schema", ".json.minLength"),
    ("minLength 1.5", {"json": {"minLength": 1.5}}, "invalid_schema", ".json.minLength"),
    ("multipleOf 0", {"json": {"multipleOf": 0}}, "invalid_schema", ".json.multipleOf"),
    ("enum an object", {"json": {"enum": {}}}, "invalid_schema", ".json.enum"),
    ("a bad definition", {"json": {"$defs": {"x": 1}}}, "invalid_schema", ".json.$defs.x"),
    ("pattern a number", {"json": {"pattern": 1}}, "invalid_schema", ".json.pattern"),
    ("pattern open", {"json": {"pattern": "[.*"}}, "invalid_schema", ".json.pattern"),
    ("pattern of names", {"json": {"patternProperties": {"(": True}}}, "invalid_schema",
     ".json.patternProperties.("),
    ("regex open", {"regex": "[.*"}, "invalid_schema", ".regex"),
    ("regex with crossed bounds", {"regex": "a{2,1}"}, "invalid_schema", ".regex"),
    ("regex with NUL", {"regex": "a\0"}, "invalid_schema", ".regex"),
    ("half a surrogate pair", {"json": {"const": "\ud800"}}, "invalid_schema", ".json"),
    ("missing $ref", {"json": {"$ref": "#/$defs/x"}}, "invalid_schema", ".json.$ref"),
    ("$ref to no schema", {"json": {"$ref": "#/title", "title": "t"}}, "invalid_schema",
     ".json.$ref"),
    ("remote $ref", {"json": {"items": {"$ref": "file:///etc/passwd"}}}, "invalid_schema",
     ".json.items.$ref"),
    ("undefined rule", {"grammar": 'root ::= "a" b'}, "invalid_schema", ".grammar"),
    ("no root", {"grammar": 'r ::= "a"'}, "invalid_schema", ".grammar"),
    ("grammar with NUL", {"grammar": 'start: "\0"'}, "invalid_schema", ".grammar"),
    ("nested bounds", {"json": {"pattern": "(x{1000}){1000}"}}, "schema_too_complex",
     ".json.pattern"),
    ("nested bounds of a regex", {"regex": "(x{1000}){1000}"}, "schema_too_complex", ".regex"),
    ("nested bounds of GBNF", {"grammar": 'root ::= ("x"{1000}){1000}'}, "schema_too_complex",
     ".grammar"),
    ("a long constant", {"json": {"const": "x" * 10**6}}, "schema_too_complex", ".json"),
    ("a constant of 5 KB", {"json": {"const": "x" * 5000}}, "schema_too_complex", ".json.const"),
    ("a pattern of 2 KB", {"json": {"pattern": "x" * 2000}}, "schema_too_complex",
     ".json.pattern"),
    ("5000 properties", {"json": OPTIONAL}, "schema_too_complex", ".json"),
    ("1001 properties", {"json": {"properties": {f"{i}": {} for i in range(1001)}}},
     "schema_too_complex", ".json.properties"),
    ("10001 values", {"json": {"enum": list(range(10_001))}}, "schema_too_complex", ".json.enum"),
    ("513 definitions", {"json": {"$defs": {f"{i}": {} for i in range(513)}}},
     "schema_too_complex", ".json.$defs"),
    ("30,000 parentheses", {"regex": "(" * 30_000}, "schema_too_complex", ".regex"),
    ("30,000 parentheses of GBNF", {"grammar": "root ::= " + "(" * 30_000}, "schema_too_complex",
     ".grammar"),
    ("30,000 brackets", {"json": "[" * 30_000}, "schema_too_complex", ".json"),
    ("30,000 brackets of a tag", {"structural_tag": "[" * 30_000}, "schema_too_complex",
     ".structural_tag"),
    ("30,000 stars", {"grammar": 'root ::= "a"' + "*" * 30_000}, "invalid_schema", ".grammar"),
    ("a deep schema", {"json": DEEP}, "schema_too_complex", ".json"),
    ("64 KiB and 1", {"json": '{"title": "' + "x" * (64 * 1024 - 12) + '"}'}, "schema_too_complex",
     ".json"),
    ("1001 choices", {"choice": ["a"] * 1001}, "schema_too_complex", ".choice"),
    ("a choice of 5 KB", {"choice": ["x" * 5000]}, "schema_too_complex", ".choice[0]"),
    ("whitespace of letters", {"json": {}, "whitespace_pattern": "x"}, "invalid_value",
     ".whitespace_pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "path"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_forms_are_refused_at_once(fields: dict[str, Any], code: str, path: str) -> None:
    started = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        form = read_structured_outputs(fields, "structured_outputs")
        make_grammar(form.outputs, form.param)
    assert time.process_time() - started < 1
    assert (caught.value.code, caught.value.param) == (code, f"structured_outputs{path}")
    assert len(caught.value.message) <= 400


@pytest.mark.parametrize(
    ("schema", "code", "reason"),
    [
        ({"enum": []}, "unsatisfiable_schema", "anyOf is empty"),
        (False, "unsatisfiable_schema", ""),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "unsatisfiable_schema", "minimum (3)"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "unsatisfiable_schema", "minLength"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "unsatisfiable_schema", "minItems (3)"),
        ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
         "unsatisfiable_schema", "'a'"),
        ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5},
         "unsatisfiable_schema", "multiple of 5"),
        ({"const": 1, "type": "string"}, "unsatisfiable_schema", "incompatible types"),
        ({"$ref": "#"}, "unsatisfiable_schema", ""),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
         "unsatisfiable_schema", ""),
        ({"patternProperties": {"a": True, "b": True}}, "unsupported_schema", "not disjoint"),
        ({"allOf": [{"properties": {"a": {}}}, {"maxProperties": 1}]}, "unsupported_schema",
         "maxProperties"),
    ],
)  # fmt: skip
def test_what_compiling_shows(schema: Any, code: str, reason: str) -> None:
    verdict = judge(vocabulary(), make_grammar(StructuredOutputs(json=schema)).text)
    with pytest.raises(InvalidRequest) as caught:
        verdict.check("structured_outputs.json")
    assert (caught.value.code, caught.value.param) == (code, "structured_outputs.json")
    assert reason in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}},
        {"enum": list(range(8000))},
        {"enum": [f"a{i}" for i in range(5000)], "pattern": "^a.*[0-9]{1,300}$"},
        {"enum": list(range(5000)), "allOf": [{"enum": list(range(4000))}]},
        {"oneOf": [{"properties": {"t": {"const": i}}, "required": ["t"], "type": "object"}
                   for i in range(300)]},
        {"patternProperties": {f"^(a|b|c){{1,200}}k{i}$": True for i in range(600)}},
        {"oneOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}], "$defs": {"d60": {}, **{
            f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}}},
        {"$defs": {"d60": {"pattern": "a"}, "x": {"pattern": "b"}, "y": {"pattern": "c"}, **{
            f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}},
         "anyOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]},
        {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i * 7 + j) % 150}"}
                                       for j in range(8)]} for i in range(150)},
         "$ref": "#/$defs/d0"},
    ],
)  # fmt: skip
def test_large_schemas_take_no_second(schema: dict[str, Any]) -> None:
    started = time.process_time()
    try:
        make_grammar(StructuredOutputs(json=schema))
    except InvalidRequest as e:
        assert e.code in ("unsupported_schema", "schema_too_complex", "unsatisfiable_schema")
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 10**9},
        {"type": "array", "minItems": 10**9},
        {"type": "string", "minLength": 1e9},
        {"type": "array", "maxItems": 2**32 - 1},
    ],
)
def test_counts_of_billions_cost_nothing(schema: dict[str, Any]) -> None:
    assert not compile_error(make_grammar(StructuredOutputs(json=schema)).text)


def test_paths_are_those_of_the_request() -> None:
    outputs = StructuredOutputs(json={"properties": {"tags": {"uniqueItems": True}}})
    for param, start in [
        ("response_format.json_schema.schema", "response_format.json_schema.schema"),
        ("structured_outputs", "structured_outputs.json"),
        ("structured_outputs.json", "structured_outputs.json"),
        ("guided_json", "guided_json"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            make_grammar(outputs, param)
        assert caught.value.param == f"{start}.properties.tags.uniqueItems"


@pytest.mark.parametrize("definition", [{"$ref": "#/$defs/d"}, {"$ref": "#/$defs/e", "title": "D"}])
def test_a_reference_that_leads_to_itself_is_not_begun(definition: dict[str, Any]) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d"}},
        "additionalProperties": False,
        "$defs": {"d": definition, "e": {"$ref": "#/$defs/d"}},
    }
    grammar = make_grammar(StructuredOutputs(json=schema)).text
    assert {walk(grammar, seed) for seed in range(5)} <= {"{}", "{ }", None}


def test_a_schema_may_be_text() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    texts = {
        make_grammar(StructuredOutputs(json=form)).text
        for form in (schema, json.dumps(schema), json.dumps(schema, indent=3))
    }
    assert len(texts) == 1 and accepts(texts.pop(), '{"a": 1}')
    assert make_grammar(StructuredOutputs(json=MappingProxyType(schema))).kind == "json"


def test_any_json_and_any_object() -> None:
    anything = make_grammar(StructuredOutputs(json=True)).text
    some = make_grammar(StructuredOutputs(json_object=True))
    for text in ("1", '"a"', "null", "[1, {}]", '{"a": [true]}'):
        assert accepts(anything, text)
        assert accepts(some.text, text) is text.startswith("{")
    assert some.kind == "json_object" and some.unenforced == ()


@pytest.mark.parametrize(
    ("options", "accepted", "rejected"),
    [
        ({}, ['{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [\n\t1,\n 2\n]\n}'], ['{"a":  [1]}']),
        ({"disable_any_whitespace": True}, ['{"a":[1,2]}'], ['{"a": [1,2]}']),
        ({"whitespace_pattern": r"\s?"}, ['{"a": [1,\t2]}'], ['{"a":  []}', '{"a":\u00a0[]}']),
        ({"whitespace_pattern": "[ ]{0,2}"}, ['{"a":  []}', '{"a":[]}'], ['{"a":   []}']),
        ({"whitespace_pattern": r"[\n\t ]*"}, ['{"a":  \n\t []}'], ['{"a":\r[]}']),
    ],
)
def test_whitespace(options: dict[str, Any], accepted: list[str], rejected: list[str]) -> None:
    grammar = make_grammar(StructuredOutputs(json={"type": "object"}, **options)).text
    for text in accepted:
        assert accepts(grammar, text), text
    for text in rejected:
        assert not accepts(grammar, text), text


def test_blanks_come_to_an_end() -> None:
    grammar = make_grammar(StructuredOutputs(json={"type": "array"})).text
    assert accepts(grammar, "[\n" + " " * 64 + "1]")
    assert not accepts(grammar, "[\n" + " " * 65 + "1]")
    assert not accepts(grammar, " []") and not accepts(grammar, "[] ")


@pytest.mark.parametrize(
    ("pattern", "accepted", "rejected"),
    [
        ("[a-z]+", ["a", "abc"], ["", "a1", "1a"]),
        ("^ab$", ["ab"], ["xab", "abx"]),
        ("a|bc", ["a", "bc"], ["abc", "ac"]),
        (r"\d{3}/\d", ["123/4"], ["123/", "١٢٣/٤"]),
        ('<b>"x"</b>#//', ['<b>"x"</b>#//'], ["<b>"]),
        ("(?:a|^b)c", ["ac", "bc"], ["c"]),
        (r"é[^\n]*\n", ["éx\n", "é\n"], ["e\n", "é\n\n"]),
        (r"[\]\-^]", ["]", "-", "^"], ["\\"]),
        (r"\u{1F600}?😀", ["😀", "😀😀"], [""]),
    ],
)
def test_a_regex_matches_the_whole(pattern: str, accepted: list[str], rejected: list[str]) -> None:
    grammar = make_grammar(StructuredOutputs(regex=pattern)).text
    assert all(accepts(grammar, text) for text in accepted)
    assert not any(accepts(grammar, text) for text in rejected)


def test_choices_are_exact() -> None:
    choices = ["a", "ab", "", 'q"\\/\n\té\x7f', "<tool>", "a.c", "a"]
    grammar = make_grammar(StructuredOutputs(choice=choices)).text
    assert all(accepts(grammar, text, {}) for text in choices)
    assert not any(accepts(grammar, text, {}) for text in ("abc", "A", "a ", "q", "<tool"))
    assert not accepts(grammar, "<tool>")  # the token is not its text


def test_a_thousand_choices_compile() -> None:
    choices = [f"choice number {i}" for i in range(1000)]
    grammar = make_grammar(StructuredOutputs(choice=choices)).text
    assert accepts(grammar, "choice number 999") and not accepts(grammar, "choice number 1000")


def test_kinds_are_named() -> None:
    fields: dict[str, Any] = {
        "json": {},
        "regex": "a",
        "choice": ["a"],
        "grammar": 'start: "a"',
        "json_object": True,
        "structural_tag": {"format": {"type": "any_text"}},
    }
    assert tuple(fields) == KINDS
    for kind, value in fields.items():
        grammar = make_grammar(StructuredOutputs(**{kind: value}))
        assert grammar.kind == kind and not compile_error(grammar.text)
