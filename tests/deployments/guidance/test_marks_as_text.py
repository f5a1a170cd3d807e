"""Texts of added tokens within forms: they are spelled by ordinary tokens, as all other texts."""

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from call_walks import END, Walker, byte_tokenizer
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.calls import make_call_rules
from rayfin.deployments.guidance.grammar import make_grammar
from rayfin.deployments.guidance.tool_choice import ToolChoice
from rayfin.deployments.guidance.tools import Tool
from rayfin.deployments.text.parsing.formats import TOOL_FORMATS

MARKS = ["<|im_start|>", "<tool_call>", "</think>", "[INST]", "\uff5cDSML\uff5c"]


def _object(name: str) -> str:
    return json.dumps({name: 1}, ensure_ascii=False)


FORMS: dict[str, Callable[[str], tuple[Mapping[str, Any], str]]] = {
    "const": lambda text: ({"json": {"const": text}}, f'"{text}"'),
    "enum": lambda text: ({"json": {"enum": [[text]]}}, f'["{text}"]'),
    "name": lambda text: (
        {
            "json": {
                "properties": {text: {"const": 1}},
                "required": [text],
                "additionalProperties": False,
                "type": "object",
            }
        },
        _object(text),
    ),
    "pattern": lambda text: ({"json": {"type": "string", "pattern": _whole(text)}}, f'"{text}"'),
    "names by pattern": lambda text: (
        {
            "json": {
                "type": "object",
                "patternProperties": {_whole(text): {"const": 1}},
                "additionalProperties": False,
                "required": [text],
            }
        },
        _object(text),
    ),
    "regex": lambda text: ({"regex": _escaped(text)}, text),
    "choice": lambda text: ({"choice": [text]}, text),
    "lark": lambda text: ({"grammar": f"start: {json.dumps(text)}"}, text),
    "gbnf": lambda text: ({"grammar": f"root ::= {json.dumps(text)}"}, text),
    "structural tag": lambda text: (
        {
            "structural_tag": {
                "type": "structural_tag",
                "format": {"type": "json_schema", "json_schema": {"const": text}},
            }
        },
        f'"{text}"',
    ),
}


JSON = {"const", "enum", "name", "pattern", "names by pattern", "structural tag"}


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]|/])", r"\\\1", text)


def _whole(text: str) -> str:
    return f"^{_escaped(text)}$"


def walk(walker: Walker, grammar: str) -> str:
    """The text of an answer that takes added tokens where it may."""
    matcher, tokens, rng = walker.matcher(grammar), list[int](), random.Random(3)
    while True:
        allowed = walker._allowed(matcher)
        assert allowed, f"{matcher.get_error()} behind {tokens}"
        if walker.end in allowed and matcher.is_accepting():
            return walker.tokenizer.decode(tokens)
        added = allowed - {walker.end} & set(walker.tokenizer.added_ids.values())
        ends = allowed & set(walker.tokenizer.encode("}"))
        tokens.append(rng.choice(sorted(added or ends or allowed)))
        assert matcher.consume_token(tokens[-1]), matcher.get_error()


@pytest.mark.parametrize("around", ["{}", "a{}b", "{}{}"])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_mark_in_a_form_is_text(form: str, special: bool, around: str) -> None:
    walker = Walker(byte_tokenizer(MARKS, special))
    for mark in [END, *MARKS]:
        fields, expected = FORMS[form](around.format(mark, mark))
        outputs = StructuredOutputs(**fields)
        grammar = make_grammar(outputs, special_tokens=walker.tokenizer.added_ids)
        found = walk(walker, grammar.text)
        if form in JSON:
            found, expected = (json.dumps(json.loads(text)) for text in (found, expected))
        assert found == expected


@pytest.mark.parametrize("special", [True, False])
def test_a_mark_in_the_arguments_of_a_call_is_text(special: bool) -> None:
    row = TOOL_FORMATS["hermes"]
    walker = Walker(byte_tokenizer(["<tool_call>", "</tool_call>", *MARKS[2:]], special))
    for mark in (END, "</tool_call>", *MARKS[1:]):
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [mark]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        tools = (Tool("get", schema, path="tools[0]"),)
        rules = make_call_rules(row, tools, ToolChoice("required"), walker.tokenizer)
        text = walk(walker, rules.grammar)
        assert re.search(rf'"a"\s*:\s*"{re.escape(mark)}"', text), text


def test_added_tokens_that_are_words_are_text() -> None:
    walker = Walker(byte_tokenizer(["covid", "    "], special=False))
    for word, ids in walker.tokenizer.added_ids.items():
        if word != END:
            assert walker.accepts(f'start: "{word}"', [ids])
