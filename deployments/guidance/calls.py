"""The rules of a request: of its tool calls, and with those of a form and of a thought.

Calls have grammars after single tokens, or one of the whole answer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.guidance import CallGrammar, Guidance, Thinking
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.answer_writer import AnswerWriter
from rayfin.deployments.guidance.call_writer import ANY_OBJECT, Callee, CallWriter
from rayfin.deployments.guidance.grammar import Grammar, make_grammar
from rayfin.deployments.guidance.lark import LarkWriter, embedded, mark_ids
from rayfin.deployments.guidance.tool_choice import ToolChoice
from rayfin.deployments.guidance.tools import Tool
from rayfin.deployments.text.messages import INPUT
from rayfin.deployments.text.parsing.format import ToolFormat, ToolGuidance
from rayfin.deployments.text.parsing.formats import TOOL_FORMATS
from rayfin.deployments.text.tokenizer import Tokenizer

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_APPLICATORS = {"$ref", "anyOf", "oneOf", "allOf", "patternProperties", "unevaluatedProperties"}


@dataclass(slots=True, frozen=True)
class CallRules:
    """Fields of ``Guidance``, and what the parser of the answer must be given."""

    grammar: str = ""  # of the whole answer after its thought, with the answer's own form
    calls: CallGrammar | None = None  # with a free answer only
    forbidden: tuple[int, ...] = ()  # triggers that may not be sampled
    unenforced: tuple[str, ...] = ()  # paths of schema keywords
    names: tuple[str, ...] = ()  # of the functions that may be called in a free answer or a thought
    forced: str = ""  # of OutputParser: "required", or the name of the function


FREE = CallRules()


def build_guidance(
    *, grammar: str = "", calls: CallRules = FREE, thinking: Thinking | None = None
) -> Guidance | None:
    """Returns the rules of all choices of a request, or None if their tokens are free.

    ``build_requests`` adds the ends, which depend on the prompt. A thought without a budget
    matters only where a grammar or calls follow it.

    Args:
        grammar: of the whole answer after its thought, forced calls included.
        calls: of calls in an answer that is free otherwise.
    """
    thinks = thinking is not None and thinking.budget is not None
    if not (grammar or calls.calls or calls.forbidden or thinks):
        return None
    return Guidance(grammar, calls.calls, calls.forbidden, thinking, names=calls.names)


def make_call_rules(
    format: ToolFormat | None,
    tools: Sequence[Tool],
    choice: ToolChoice,
    tokenizer: Tokenizer,
    *,
    guidance: ToolGuidance = "json",
    answer: Grammar | None = None,
    loose: frozenset[str] = frozenset(),
) -> CallRules:
    """Returns what holds an answer to the tools and the choice of a request.

    Args:
        format: the model's; None where none is known: forced calls are JSON, others are text.
        guidance: of calls that are free to be made. ``schema``: arguments follow their schema;
            ``json``: they are any object, but those of strict functions; ``off``: only strict
            functions and a limit on calls have rules.
        answer: the form of the answer where it is no call; a forced one always is.
        loose: names of functions whose arguments are any object, whatever their schema says; the
            rules name these schemas.

    Raises:
        InvalidRequest: a schema that cannot be enforced.
    """
    if choice.forced and choice.name is not None and format is None:
        return _arguments_alone(tools, choice, loose)
    row = format if format is not None else TOOL_FORMATS["json"] if choice.forced else None
    maker = None if row is None else _RuleMaker(row, tokenizer, choice, guidance, answer, loose)
    if maker is None:
        return CallRules(grammar="" if answer is None else answer.text)
    callable_tools = choice.callable_tools(tuple(tools))
    if not callable_tools:
        return maker.without_calls(bool(tools))
    return maker.with_calls(callable_tools)


class _RuleMaker:
    """Makes the rules of one request for a known format."""

    def __init__(
        self,
        row: ToolFormat,
        tokenizer: Tokenizer,
        choice: ToolChoice,
        guidance: ToolGuidance,
        answer: Grammar | None,
        loose: frozenset[str],
    ) -> None:
        self._row = row
        self._choice = choice
        self._guidance = guidance
        self._answer = answer
        self._loose = loose
        self._ids = mark_ids(tokenizer, [row])
        self._ends = tokenizer.eos_token_ids
        self._lark = LarkWriter(self._ids, self._ends)
        self._unenforced: list[str] = []
        self._names: tuple[str, ...] = ()

    def without_calls(self, has_tools: bool) -> CallRules:
        """The model sees the tools and may call none."""
        if self._answer is not None:  # no trigger is in its form
            around = self._row.syntax == "channels" or self._row.frame[1]
            return CallRules(self._whole_answer() if around else self._answer.text)
        triggers = self._triggers()
        if has_tools and not triggers and not self._row.bare:
            return CallRules(grammar=self._lark.text(self._writer().only_text()))
        return CallRules(forbidden=triggers if has_tools else ())

    def with_calls(self, tools: Sequence[Tool]) -> CallRules:
        """The answer may hold calls, or is calls."""
        choice = self._choice
        callees = [self._callee(tool) for tool in tools]
        self._names = tuple(callee.name for callee in callees)
        several = choice.parallel and choice.name is None
        if choice.forced:
            start = self._writer().only_calls(callees, several=several)
            forced = choice.name or "required"
            return self._rules(self._lark.text(start), forced=forced)
        if self._answer is not None:
            return self._rules(self._whole_answer(callees, several))
        held = any(callee.schema is not None for callee in callees)
        if self._guidance == "off" and several and not held:
            return self._rules("")
        triggers = self._triggers()
        if not triggers and self._row.syntax == "channels":
            start = self._writer().text_and_calls(callees, several=several)
            return self._rules(self._lark.text(start))
        if not triggers:
            return self._rules("", self._calls_in_text(callees, several))
        inner = CallWriter(self._lark, self._row)
        mark = next(mark for mark in self._row.triggers if mark in self._ids)
        body = self._lark.text(inner.behind(mark, callees, several=several))
        return self._rules("", CallGrammar(triggers, body, None if several else 1))

    def _calls_in_text(self, callees: Sequence[Callee], several: bool) -> CallGrammar:
        """Calls whose marks are texts, each with a grammar of its own."""
        marks = []
        for mark in self._writer().openings:
            lark = LarkWriter(self._ids, self._ends)
            begun = AnswerWriter(lark, self._row).begun(mark, callees, several=several)
            marks.append((mark, lark.text(begun)))
        if several:
            return CallGrammar((), "", None, tuple(marks))
        lark = LarkWriter(self._ids, self._ends)
        rest = lark.text(AnswerWriter(lark, self._row).behind_the_last(callees))
        return CallGrammar((), "", 1, tuple(marks), rest)

    def _writer(self) -> AnswerWriter:
        return AnswerWriter(self._lark, self._row)

    def _rules(self, grammar: str, calls: CallGrammar | None = None, forced: str = "") -> CallRules:
        names = self._names if grammar or calls else ()
        return CallRules(grammar, calls, (), tuple(self._unenforced), names, forced)

    def _whole_answer(self, callees: Sequence[Callee] = (), several: bool = True) -> str:
        """Calls, or an answer of its own form."""
        assert self._answer is not None
        writer = self._writer()
        start = writer.around(self._lark.rule(embedded(self._answer.text)))
        if callees:
            start = f"{writer.only_calls(callees, several=several)} | {start}"
        return self._lark.text(start)

    def _triggers(self) -> tuple[int, ...]:
        """The single tokens behind which a call begins."""
        row = self._row
        if not any(mark in self._ids for mark in row.triggers):
            return ()
        marks = (*row.triggers, *row.openings) if row.layout == "list" else row.triggers
        return tuple(self._ids[mark] for mark in marks if mark in self._ids)

    def _callee(self, tool: Tool) -> Callee:
        if not (tool.strict or self._choice.forced or self._guidance == "schema"):
            return Callee(tool.name)
        if tool.name in self._loose:
            self._unenforced.append(tool.path)
            return Callee(tool.name)
        callee, unenforced = held_callee(tool)
        if callee.schema is not None and not CallWriter(self._lark, self._row).can_hold(callee):
            if tool.strict:
                raise InvalidRequest(
                    f"{tool.path} cannot be enforced in the way in which this model writes calls.",
                    tool.path,
                    "unsupported_schema",
                )
            callee, unenforced = Callee(tool.name), (tool.path,)
        self._unenforced += unenforced
        return callee


def held_callee(tool: Tool) -> tuple[Callee, tuple[str, ...]]:
    """Returns a function with a schema that can be enforced, and the paths of what cannot.

    Raises:
        InvalidRequest: the function is strict, and its schema cannot be enforced.
    """
    schema: Mapping[str, Any] = dict(tool.parameters) or NO_ARGUMENTS
    kind = schema.get("type", "object")
    if kind != "object":
        if kind != ["object"] and tool.strict:
            raise InvalidRequest(
                f"{tool.path}.type must be 'object'.", f"{tool.path}.type", "invalid_schema"
            )
        return Callee(tool.name), (f"{tool.path}.type",)
    schema = {**schema, "type": "object"}
    if "properties" in schema and not _APPLICATORS & schema.keys():
        schema.setdefault("additionalProperties", False)
    try:
        outputs = StructuredOutputs(json=schema, strict=True if tool.strict else False)
        grammar = make_grammar(outputs, tool.path)
    except InvalidRequest:
        if tool.strict:
            raise
        return Callee(tool.name), (tool.path,)
    (entry,) = json.loads(grammar.text)["grammars"]
    if tool.pattern:
        entry["json_schema"]["properties"][INPUT]["pattern"] = tool.pattern
    return Callee(tool.name, entry["json_schema"]), grammar.unenforced


def arguments_grammar(tool: Tool) -> str:
    """Returns the grammar of a function's arguments alone, "" if they are any object.

    Raises:
        InvalidRequest: as :func:`held_callee`.
    """
    schema = held_callee(tool)[0].schema
    return "" if schema is None else json.dumps({"grammars": [{"json_schema": schema}]})


def _arguments_alone(tools: Sequence[Tool], choice: ToolChoice, loose: frozenset[str]) -> CallRules:
    """The arguments of the named function are the whole answer, where no format is known."""
    (tool,) = choice.callable_tools(tuple(tools))
    callee = Callee(tool.name)
    unenforced: tuple[str, ...] = (tool.path,)
    if tool.name not in loose:
        callee, unenforced = held_callee(tool)
    lark = LarkWriter({})
    text = lark.text(lark.json(ANY_OBJECT if callee.schema is None else callee.schema))
    return CallRules(grammar=text, unenforced=unenforced, forced=tool.name)
