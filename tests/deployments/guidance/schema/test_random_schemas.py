"""Random schemas: what is drawn under the masks is valid, and what is valid is mostly accepted."""

import json
from collections import Counter
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from byte_matcher import accepts, compile_error, has_repeated_key, walk
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.grammar import make_grammar

NAMES = ["a", "b", "x-c", 'd"e', "é"]
PATTERNS = ["^a", "b$", "^[ab]{1,3}$", "a|^b", r"^\d+$", "^x-", r"\.", "^(ab|c)*$", "^(a|b)$"]
REFUSED = {"unsupported_schema", "unsatisfiable_schema"}

names = st.sampled_from(NAMES)
numbers = st.one_of(
    st.integers(-20, 20), st.sampled_from([0.5, -1.25, 2.75, 10.0, 0.1, 1e-3, 123456.789])
)
counts = st.integers(0, 3)
texts = st.one_of(st.sampled_from(["", "a", "ab", "b", "abc", "12"]), st.text(max_size=3))
plain_values = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    plain_values,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=5,
)


def optional(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


number_schemas = optional(
    minimum=numbers,
    maximum=numbers,
    exclusiveMinimum=numbers,
    exclusiveMaximum=numbers,
    multipleOf=st.sampled_from([1, 2, 3, 0.5, 0.25, 0.1]),
).flatmap(lambda s: st.sampled_from(["integer", "number"]).map(lambda t: {"type": t, **s}))
string_schemas = optional(
    minLength=counts, maxLength=st.integers(1, 6), pattern=st.sampled_from(PATTERNS)
).map(lambda s: {"type": "string", **s})
leaf_schemas = st.one_of(
    st.booleans(),
    st.just({}),
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"$ref": "#/$defs/d"}, {"$ref": "#"}]),
    number_schemas,
    string_schemas,
    st.lists(values, min_size=1, max_size=4).map(lambda v: {"enum": v}),
    values.map(lambda v: {"const": v}),
    numbers.map(lambda n: {"minimum": n}),
    st.lists(names, max_size=2, unique=True).map(lambda n: {"required": n}),
)


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    arrays = optional(items=inner, prefixItems=several, minItems=counts, maxItems=counts).map(
        lambda s: {"type": "array", **s}
    )
    objects = optional(
        properties=st.dictionaries(names, inner, max_size=4),
        required=st.lists(names, max_size=2, unique=True),
        additionalProperties=inner,
        patternProperties=st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
        maxProperties=counts,
        propertyNames=st.one_of(
            st.sampled_from(PATTERNS).map(lambda pattern: {"pattern": pattern}),
            st.lists(names, max_size=3, unique=True).map(lambda listed: {"enum": listed}),
        ),
        dependentRequired=st.dictionaries(
            names, st.lists(names, max_size=2, unique=True), max_size=2
        ),
    ).map(lambda s: {"type": "object", **s})
    combined = optional(
        anyOf=several,
        allOf=several,
        oneOf=several,
        properties=st.dictionaries(names, inner, max_size=2),
        type=st.sampled_from(["object", "string", "integer"]),
    )
    return st.one_of(arrays, objects, objects, combined)


schemas = st.recursive(leaf_schemas, composed, max_leaves=8)
roots = st.tuples(composed(schemas), schemas).map(lambda pair: {**pair[0], "$defs": {"d": pair[1]}})
SETTINGS = settings(suppress_health_check=list(HealthCheck), print_blob=False)


def exact(text: str) -> Any:
    """With decimal numbers, so that multiples of 0.1 are counted as they are written."""
    return json.loads(text, parse_float=Decimal)


def validator(schema: Any) -> Draft202012Validator:
    return Draft202012Validator(exact(json.dumps(schema)))


def grammar_of(schema: Any) -> str | None:
    """The grammar, or None if it is refused for a reason that a schema may have."""
    try:
        text = make_grammar(StructuredOutputs(json=schema)).text
    except InvalidRequest as e:
        assert e.code in REFUSED, e
        assert e.param is not None and e.param.startswith("structured_outputs.json")
        return None
    return None if compile_error(text) else text


@given(schema=roots, seed=st.integers(0, 2**32))
@SETTINGS
def test_what_is_drawn_is_valid(schema: dict[str, Any], seed: int) -> None:
    grammar = grammar_of(schema)
    answer = walk(grammar, seed) if grammar is not None else None
    if answer is not None and not has_repeated_key(answer):
        validator(schema).validate(exact(answer))


@given(schema=roots, value=values)
@SETTINGS
def test_what_is_accepted_is_valid(schema: dict[str, Any], value: Any) -> None:
    grammar = grammar_of(schema)
    text = json.dumps(value, ensure_ascii=False)
    if grammar is not None and accepts(grammar, text):
        validator(schema).validate(exact(text))


@given(schema=roots, value=values)
@SETTINGS
def test_what_cannot_be_satisfied_has_no_value(schema: dict[str, Any], value: Any) -> None:
    try:
        make_grammar(StructuredOutputs(json=schema))
    except InvalidRequest as e:
        if e.code == "unsatisfiable_schema":
            # A reference that leads to itself has no end in the validator either.
            with suppress(RecursionError):
                assert not validator(schema).is_valid(exact(json.dumps(value))), e


@pytest.mark.slow(reason="compiles hundreds of schemas")
def test_most_schemas_are_enforced() -> None:
    """The generator makes more of what is refused than users do; it may not get worse."""
    seen: Counter[str] = Counter()

    @given(schema=roots)
    @settings(SETTINGS, max_examples=200, database=None, derandomize=True)
    def count(schema: dict[str, Any]) -> None:
        try:
            text = make_grammar(StructuredOutputs(json=schema)).text
        except InvalidRequest as e:
            seen[str(e.code)] += 1
        else:
            seen["enforced" if not compile_error(text) else "refused by llguidance"] += 1

    count()
    assert seen["enforced"] > 0.4 * seen.total(), seen
    assert seen["refused by llguidance"] < 0.1 * seen.total(), seen


@pytest.mark.parametrize("seed", range(20))
def test_strings_of_formats_are_drawn_whole(seed: int) -> None:
    for name in ("date", "ipv4", "ipv6", "uuid", "email", "uri", "duration", "time"):
        grammar = grammar_of({"type": "string", "format": name})
        assert grammar is not None
        answer = walk(grammar, seed)
        assert answer is None or isinstance(json.loads(answer), str)
