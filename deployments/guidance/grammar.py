"""From ``StructuredOutputs`` to the text of a grammar that llguidance enforces completely."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.fields import KINDS
from rayfin.deployments.guidance.fields import check_size as check_form_size
from rayfin.deployments.guidance.gbnf import gbnf_to_lark
from rayfin.deployments.guidance.json_text import JsonStyle, json_style, json_text
from rayfin.deployments.guidance.lark import literal, regex, rewrite_schemas
from rayfin.deployments.guidance.schema.ecma import parse
from rayfin.deployments.guidance.schema.lint import (
    MAX_BYTES,
    MAX_CHOICES,
    check_count,
    check_literal,
    check_size,
    check_text,
    parse_json,
)
from rayfin.deployments.guidance.schema.pattern_parts import write
from rayfin.deployments.guidance.structural_tag import structural_tag_to_lark

if TYPE_CHECKING:  # the process that checks grammars has none
    from rayfin.deployments.text.tokenizer import Tokenizer

KNOWN_FORMS = 128  # forms that were read lately: a program sends its own each time
NAMES = tuple(field.name for field in fields(StructuredOutputs))


@dataclass(slots=True, frozen=True)
class Grammar:
    """A grammar as llguidance takes it: Lark, or JSON."""

    text: str
    kind: str  # one of KINDS
    unenforced: tuple[str, ...] = ()  # paths of keywords that hold nothing


class _Asked(NamedTuple):
    """What a request asks for, with what belongs to it."""

    value: Any
    path: str
    style: JsonStyle
    special_tokens: Mapping[str, int]
    max_bytes: int


def form_text(outputs: StructuredOutputs) -> str:
    """Returns a form as JSON.

    Raises:
        TypeError, ValueError, RecursionError: it is no JSON; ``make_grammar`` refuses it.
    """
    return json.dumps([getattr(outputs, name) for name in NAMES], ensure_ascii=False)


def form_from(text: str) -> StructuredOutputs:
    """The form that ``form_text`` was made from."""
    return StructuredOutputs(**dict(zip(NAMES, json.loads(text), strict=True)))


def make_grammar(
    outputs: StructuredOutputs,
    param: str = "structured_outputs",
    *,
    special_tokens: Mapping[str, int] = {},
    max_bytes: int = MAX_BYTES,
) -> Grammar:
    """Returns the grammar of an answer of this form. It is not compiled here.

    Args:
        outputs: as ``fields`` has checked it: one kind, of the right type.
        param: the path of the schema, pattern or grammar. The default is the path of ``outputs``.
        special_tokens: ids by text, of the tokens that grammars and structural tags may name.
        max_bytes: of the schema, pattern or grammar.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong; ``code`` is ``invalid_value``,
            ``invalid_type``, ``invalid_schema``, ``unsupported_schema``, ``unsatisfiable_schema``
            or ``schema_too_complex``.
    """
    kind = next(kind for kind in KINDS if getattr(outputs, kind) is not None)
    alone = param == "structured_outputs"
    path = f"{param}.{kind}" if alone else param
    around = param if alone or not param.endswith(f".{kind}") else param.rpartition(".")[0]
    style = json_style(outputs, around, max_bytes)
    asked = _Asked(getattr(outputs, kind), path, style, special_tokens, max_bytes)
    text, unenforced = _MAKERS[kind](asked)
    return Grammar(text, kind, tuple(unenforced))


def _from_json(asked: _Asked) -> tuple[str, Sequence[str]]:
    schema = asked.value
    if isinstance(schema, str):
        schema = parse_json(schema, asked.path, asked.max_bytes)
    return _schema_grammar(schema, asked)


def _from_json_object(asked: _Asked) -> tuple[str, Sequence[str]]:
    return _schema_grammar({"type": "object"}, asked)


def _schema_grammar(schema: Any, asked: _Asked) -> tuple[str, Sequence[str]]:
    written = json_text(schema, asked.path, asked.style)
    return f'{{"grammars":[{{"json_schema":{written.text}}}]}}', written.unenforced


def _from_regex(asked: _Asked) -> tuple[str, Sequence[str]]:
    check_text(asked.value, asked.path)
    part = parse(asked.value, asked.path, max_length=asked.max_bytes)
    return f"start: {regex(write(part, edges=False))}", ()


def _from_choice(asked: _Asked) -> tuple[str, Sequence[str]]:
    choices, path = asked.value, asked.path
    check_count(len(choices), MAX_CHOICES, "choices", path)
    for i, choice in enumerate(choices):
        check_text(choice, f"{path}[{i}]")
        check_literal(choice, f"{path}[{i}]")
    check_size("".join(choices), path, asked.max_bytes)
    return "start: " + " | ".join(map(literal, dict.fromkeys(choices))), ()


def _from_grammar(asked: _Asked) -> tuple[str, Sequence[str]]:
    text = asked.value
    if "::=" in text:
        lark = gbnf_to_lark(
            text, asked.path, special_tokens=asked.special_tokens, max_bytes=asked.max_bytes
        )
        return lark, ()
    return rewrite_schemas(text, asked.path, asked.style, asked.max_bytes)


def _from_structural_tag(asked: _Asked) -> tuple[str, Sequence[str]]:
    tag = asked.value
    if isinstance(tag, str):
        tag = parse_json(tag, asked.path, asked.max_bytes)
    return structural_tag_to_lark(
        tag,
        asked.path,
        special_tokens=asked.special_tokens,
        style=asked.style,
        max_bytes=asked.max_bytes,
    )


_MAKERS: dict[str, Callable[[_Asked], tuple[str, Sequence[str]]]] = {
    "json": _from_json,
    "json_object": _from_json_object,
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "structural_tag": _from_structural_tag,
}


def answer_grammar(
    outputs: StructuredOutputs, param: str, tokenizer: "Tokenizer", max_bytes: int = MAX_BYTES
) -> Grammar:
    """Returns the grammar of a form; a form that was seen lately is not read again.

    Raises:
        InvalidRequest: as ``make_grammar``.
    """
    check_form_size(outputs, param, max_bytes)
    try:
        text = form_text(outputs)
    except (TypeError, ValueError, RecursionError):  # offline: no JSON, which make_grammar refuses
        special_tokens = tokenizer.added_ids
        return make_grammar(outputs, param, special_tokens=special_tokens, max_bytes=max_bytes)
    return _known_grammar(text, param, tokenizer, max_bytes)


@lru_cache(KNOWN_FORMS)
def _known_grammar(text: str, param: str, tokenizer: "Tokenizer", max_bytes: int) -> Grammar:
    special_tokens = tokenizer.added_ids
    return make_grammar(form_from(text), param, special_tokens=special_tokens, max_bytes=max_bytes)
