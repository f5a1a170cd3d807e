"""From ``StructuredOutputs`` to the text of a grammar."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.text.checks import as_list, as_string, wrong_type

WHITESPACE = r"[ ]|\n[ \t]{0,64}"
"""Between the parts of JSON: nothing, a blank, or a line break with its indentation."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 1000


@dataclass(slots=True, frozen=True)
class Grammar:
    """A grammar as llguidance takes it."""

    text: str
    kind: str  # one of KINDS
    unenforced: tuple[str, ...] = ()  # paths of keywords that hold nothing


def make_grammar(
    outputs: StructuredOutputs,
    param: str = "structured_outputs",
    *,
    special_tokens: Mapping[str, int] = {},
) -> Grammar:
    """Returns the grammar of an answer of this form.

    Args:
        param: the path of the schema, pattern or grammar. The default is the path of ``outputs``.
        special_tokens: ids of the tokens that a structural tag may name by their texts.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
    """
    kinds = [kind for kind in KINDS if getattr(outputs, kind) is not None]
    if len(kinds) != 1:
        which = f"got {', '.join(kinds)}" if kinds else "got none"
        raise InvalidRequest(
            f"{param} must have exactly one of {', '.join(KINDS)}, {which}.", param
        )
    path = f"{param}.{kinds[0]}" if param == "structured_outputs" else param
    if kinds[0] not in _MAKERS:
        raise InvalidRequest(f"{path} is not supported yet.", path, "unsupported_parameter")
    text, unenforced = _MAKERS[kinds[0]](outputs, path)
    return Grammar(text, kinds[0], unenforced)


def _from_json(outputs: StructuredOutputs, path: str) -> tuple[str, tuple[str, ...]]:
    schema: Any = outputs.json
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as e:
            raise InvalidRequest(f"{path} is no JSON: {e}.", path, "invalid_schema") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise wrong_type("an object", schema, path)
    options: dict[str, Any] = {"json_allow_general_unicode_escapes": True}
    if outputs.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = outputs.whitespace_pattern or WHITESPACE
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options), ()


def _from_json_object(outputs: StructuredOutputs, path: str) -> tuple[str, tuple[str, ...]]:
    if outputs.json_object is not True:
        raise InvalidRequest(f"{path} must be true.", path)
    return LLMatcher.grammar_from_json_schema('{"type": "object"}'), ()


def _from_regex(outputs: StructuredOutputs, path: str) -> tuple[str, tuple[str, ...]]:
    pattern = as_string(outputs.regex, path)
    try:
        re.compile(pattern)
    except re.error as e:
        raise InvalidRequest(f"{path} is no pattern: {e}.", path, "invalid_schema") from None
    return LLMatcher.grammar_from_regex(pattern), ()


def _from_choice(outputs: StructuredOutputs, path: str) -> tuple[str, tuple[str, ...]]:
    choices = as_list(outputs.choice, path, MAX_CHOICES)
    texts = [as_string(choice, f"{path}[{i}]") for i, choice in enumerate(choices)]
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts), ()


_MAKERS: dict[str, Callable[[StructuredOutputs, str], tuple[str, tuple[str, ...]]]] = {
    "json": _from_json,
    "json_object": _from_json_object,
    "regex": _from_regex,
    "choice": _from_choice,
}
