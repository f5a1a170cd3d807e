"""Whatever a request has in the fields of forms and tools: a grammar or a refusal with its path."""

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from call_walks import byte_tokenizer, tokens_of
from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.calls import make_call_rules
from rayfin.deployments.guidance.compile_check import is_plain
from rayfin.deployments.guidance.fields import asked_format, read_structured_outputs
from rayfin.deployments.guidance.grammar import Grammar, make_grammar
from rayfin.deployments.guidance.schema import keywords
from rayfin.deployments.guidance.tool_choice import read_tool_choice
from rayfin.deployments.guidance.tools import declared_tools
from rayfin.deployments.text.parsing.formats import TOOL_FORMATS
from rayfin.deployments.text.tokenizer import Tokenizer

SETTINGS = settings(suppress_health_check=list(HealthCheck), print_blob=False)
CODES = {
    *("invalid_value", "invalid_type", "missing_required_parameter", "empty_array"),
    *("invalid_schema", "unsupported_schema", "unsatisfiable_schema", "schema_too_complex"),
    *("array_above_max_length", "string_above_max_length"),
}
KEYWORDS = sorted(
    {*keywords.STRUCTURE, *keywords.REFUSED, *keywords.REFUSED_REFERENCES, *keywords.DESCRIPTIONS}
    | {*keywords.SCHEMAS, *keywords.SCHEMA_LISTS, *keywords.SCHEMA_MAPS, *keywords._SHAPES}
)
WORDS = [
    *("", "a", "#", "#/$defs/a", "#a", "#/%25", "http://x/y", "object", "string", "array", "strng"),
    *("^a.*b$", "[", "(?<n>a)\\k<n>", "a{2,1}", "\\u{110000}", "\\p{L}", "date", "uuid", "iri"),
    *("\ud800", "\0", "true", "1e400", "☃", "a" * 5000),
]
words = st.one_of(st.sampled_from(WORDS), st.text(max_size=4))
numbers = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([10**30, -(10**30), 0.5, -0.0, 1e-320, 1e308, 1.0, 2.5, 10**1300]),
    st.floats(),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, words)


def documents(names: list[str]) -> st.SearchStrategy[Any]:
    keys = st.one_of(st.sampled_from(names), st.sampled_from(names), words)
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)
        ),
        max_leaves=12,
    )


def refused_or_done(work: Callable[[], Any]) -> Any:
    """The result, or None for a refusal that can be shown to a client."""
    try:
        return work()
    except InvalidRequest as error:
        assert error.code in CODES, error
        assert error.param and "\n" not in str(error), error
        json.dumps(error.param)
        return None


def grammar_of(**fields: Any) -> Grammar:
    form = read_structured_outputs(fields, "structured_outputs")
    return make_grammar(form.outputs, form.param)


@SETTINGS
@given(documents(KEYWORDS), st.sampled_from([None, False, True]), st.booleans())
def test_schemas(schema: Any, strict: bool | None, closed: bool) -> None:
    for written in (schema, None if schema is None else json.dumps(schema)):
        options = {"strict": strict, "disable_additional_properties": closed}
        grammar = refused_or_done(partial(grammar_of, json=written, **options))
        if grammar is not None:
            is_plain(grammar.text)
            json.loads(grammar.text)


PIECES = [*r"()[]{}|*+?.^$\/-,:=!<>&#%~'", '"', "\n", " ", "a", "B", "1", "start", "root", "::="]
PIECES += [": ", '"a"', "/[a-z]+/", "{1,3}", "\\d", "\\u", "(?=", "(?:", "[^", "%json", "%import"]
PIECES += ["%ignore", "<[1]>", "<a>", "_x", "é", "\0", "\\x", "@", "~", "..", "->"]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
STARTS = ["", "start: ", "root ::= ", 'start: a\na: "b" ', 'root ::= a\na ::= "b" ']


@SETTINGS
@given(st.sampled_from(["regex", "grammar", "whitespace_pattern"]), st.sampled_from(STARTS), texts)
def test_patterns_and_grammars(kind: str, start: str, text: str) -> None:
    given: dict[str, Any] = {kind: start + text if kind == "grammar" else text}
    if kind == "whitespace_pattern":
        given["json_object"] = True
    refused_or_done(partial(grammar_of, **given))


TYPES = [
    *("const_string", "json_schema", "regex", "grammar", "any_text", "sequence", "or", "optional"),
    *("star", "plus", "tag", "triggered_tags", "tags_with_separator", "token", "wizard"),
]
MEMBERS = [
    *("type", "value", "json_schema", "pattern", "grammar", "elements", "content", "begin", "end"),
    *("tags", "triggers", "separator", "at_least_one", "stop_after_first", "token", "excludes"),
]


def member(name: str, inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    if name == "type":
        return st.sampled_from(TYPES)
    return st.one_of(inner, st.lists(inner, max_size=3), scalars)


formats = st.recursive(
    st.one_of(scalars, st.sampled_from(TYPES).map(lambda kind: {"type": kind, "value": "a"})),
    lambda inner: st.fixed_dictionaries(
        {"type": st.sampled_from(TYPES)},
        optional={name: member(name, inner) for name in MEMBERS[1:]},
    ),
    max_leaves=8,
)
old_tags = st.fixed_dictionaries(
    {"structures": st.lists(st.dictionaries(st.sampled_from(["begin", "schema", "end"]), formats))},
    optional={"triggers": st.one_of(st.lists(words, max_size=2), scalars)},
)


@SETTINGS
@given(st.one_of(formats.map(lambda own: {"format": own}), old_tags, documents(MEMBERS)))
def test_structural_tags(tag: Any) -> None:
    refused_or_done(partial(grammar_of, structural_tag=tag))


FIELDS = ["type", "json_schema", "schema", "name", "strict", "format", "json", "regex", "choice"]


@SETTINGS
@given(documents(FIELDS), documents(FIELDS), st.dictionaries(st.sampled_from(FIELDS), scalars))
def test_fields(response_format: Any, structured: Any, guided: dict[str, Any]) -> None:
    old = {f"guided_{name}": own for name, own in guided.items() if name in ("json", "regex")}
    form = refused_or_done(lambda: asked_format(response_format, structured, old))
    if form is not None:
        refused_or_done(lambda: make_grammar(form.outputs, form.param))


TOOL_FIELDS = ["type", "function", "name", "parameters", "strict", "allowed_tools", "mode", "tools"]
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "a.b"])},
    optional={
        "parameters": st.one_of(
            st.dictionaries(st.sampled_from(KEYWORDS), documents(KEYWORDS), max_size=3), scalars
        ),
        "strict": st.sampled_from([None, False, True, 1]),
    },
)
tools_strategy = st.one_of(
    st.lists(functions.map(lambda own: {"type": "function", "function": own}), max_size=3),
    documents(TOOL_FIELDS),
)
choices = st.one_of(
    st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
    documents(TOOL_FIELDS),
)


@cache
def tokenizer_of(row: str | None) -> Tokenizer:
    return byte_tokenizer([] if row is None else tokens_of(TOOL_FORMATS[row]))


@pytest.mark.parametrize("row", ["hermes", "qwen3_coder", "gemma4", "pythonic", "openai", None])
@SETTINGS
@given(tools_strategy, choices)
def test_tools(row: str | None, tools: Any, choice: Any) -> None:

    def rules() -> Any:
        listed = declared_tools(tools).functions
        chosen = read_tool_choice(choice, listed)
        format = None if row is None else TOOL_FORMATS[row]
        return make_call_rules(format, listed, chosen, tokenizer_of(row), guidance="schema")

    refused_or_done(rules)
