"""How the answers of one request are guided and read."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.guidance import Guidance
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.calls import arguments_grammar, build_guidance, make_call_rules
from rayfin.deployments.guidance.compile_check import GrammarChecker, InlineChecker
from rayfin.deployments.guidance.fields import size_up_to
from rayfin.deployments.guidance.grammar import Grammar, answer_grammar
from rayfin.deployments.guidance.schema.lint import MAX_BYTES
from rayfin.deployments.guidance.thinking import call_marks, make_thinking
from rayfin.deployments.guidance.tool_choice import ToolChoice
from rayfin.deployments.guidance.tools import KNOWN_TOOLS, Tool
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.format import IdStyle, ToolGuidance, thought_start
from rayfin.deployments.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rayfin.deployments.generation.service import OpenAIService
    from rayfin.deployments.text.parsing.parser import OutputParser

MANY_TOOLS = 32  # from which on their rules are made off the event loop
LONG_FORM = 2048  # bytes, from which on the checker makes the grammar of a form
MOST_REFUSED = 2  # schemas of functions, before all are given up
UNENFORCED = "x-rayfin-unenforced"
LONGEST_HEADER = 4096  # bytes; proxies refuse the headers of an answer beyond 8 KiB or so


@dataclass(slots=True, frozen=True)
class AnswerRules:
    """What a request says of the form of its answers, whatever the API."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    structured: StructuredOutputs | None = None
    structured_param: str = "response_format"  # its path in the request, for errors
    budget: int | None = None  # tokens of a thought
    budget_param: str = "thinking_token_budget"
    loose: frozenset[str] = frozenset()  # functions whose schemas were given up

    @property
    def ask_nothing(self) -> bool:
        """Returns whether answers are free: no part of ``guidance/`` has to do with them."""
        return not self.tools and self.structured is None and self.budget is None

    @property
    def take_long(self) -> bool:
        """Whether their grammars are made off the event loop."""
        return len(self.tools) > MANY_TOOLS

    @property
    def form(self) -> StructuredOutputs | None:
        """Returns the form that the answer is held to: a forced call wins, as at OpenAI."""
        if self.structured is None or self.choice.forced:
            return None
        return self.structured

    @property
    def long_form(self) -> StructuredOutputs | None:
        """The form of the answer, if its grammar is made in another process."""
        form = self.form
        return form if form is not None and size_up_to(form, LONG_FORM) > LONG_FORM else None

    @property
    def grammar_param(self) -> str:
        """The field that a grammar of the request comes from, for errors."""
        return "tools" if self.form is None else self.structured_param


@dataclass(slots=True, frozen=True)
class OutputPlan:
    """Made by an API's adapter, after the checker has checked the grammars."""

    guidance: Guidance | None = None  # of all choices
    make_parser: "Callable[[], OutputParser] | None" = None  # a parser for each choice
    unenforced: tuple[str, ...] = ()  # paths of schema keywords, for x-rayfin-unenforced
    id_style: IdStyle = "openai"  # of call ids
    earlier_calls: int = 0  # in the conversation, counted by ids of the style "kimi"
    choice: ToolChoice = ToolChoice()
    tools: Mapping[str, Tool] = field(default_factory=dict)  # that may be called, by name
    reasons: bool = False  # the model's reasoning is known, so that its tokens are counted
    kind: str = ""  # what the grammar was made from, for the metrics
    param: str = ""  # the field of the grammar, for errors

    def parser(self) -> "OutputParser | None":
        """Returns a new parser; None if answers are plain text."""
        return None if self.make_parser is None else self.make_parser()

    @property
    def headers(self) -> dict[str, str]:
        """Of the reply: what of the request's schemas is not enforced, as percent-encoded paths.

        Paths that do not fit are left out, and "..." is the last one.
        """
        paths = [quote(path, safe="/$.[]@:~") for path in self.unenforced]
        kept: list[str] = []
        for path in paths:
            if sum(map(len, kept)) + 2 * len(kept) + len(path) > LONGEST_HEADER:
                kept.append("...")
                break
            kept.append(path)
        return {UNENFORCED: ", ".join(kept)} if kept else {}


NO_PLAN = OutputPlan()


async def plan_answers(
    service: "OpenAIService",
    rules: AnswerRules,
    opening: str = "",
    *,
    earlier_calls: int = 0,
    tenant: str = "",
) -> OutputPlan:
    """Returns the plan of a chat's answers; its grammars are checked.

    Args:
        opening: what the template puts into the model's mouth (``ChatPrompt.opening``): whether
            an answer starts inside a thought is read from it alone.
        earlier_calls: tool calls in the conversation.
        tenant: of the request; new grammars are compiled in turns.

    Raises:
        InvalidRequest: a field that this model cannot follow, or a grammar that is refused.
        Overloaded: too many unknown grammars wait.
    """
    max_bytes = service.checker.max_bytes
    answer = await _long_answer(service.checker, rules, tenant)

    async def make(rules: AnswerRules) -> OutputPlan:
        work = partial(
            make_plan,
            service.formats,
            service.tokenizer,
            rules,
            opening,
            earlier_calls,
            max_bytes,
            answer=answer,
        )
        return await asyncio.to_thread(work) if rules.take_long else work()

    plan = await _allowed(make, service.checker, service.formats, rules, tenant)
    return _counted(service, plan)


def plan_offline(
    formats: Detected,
    tokenizer: Tokenizer,
    checker: InlineChecker,
    rules: AnswerRules,
    opening: str = "",
    earlier_calls: int = 0,
) -> OutputPlan:
    """As :func:`plan_answers`, for callers without an event loop."""

    async def make(rules: AnswerRules) -> OutputPlan:
        max_bytes = checker.max_bytes
        return make_plan(formats, tokenizer, rules, opening, earlier_calls, max_bytes)

    try:
        _allowed(make, checker, formats, rules).send(None)
    except StopIteration as ended:
        plan: OutputPlan = ended.value
        return plan
    raise RuntimeError("a check in this process waits for something")


async def plan_text(service: "OpenAIService", rules: AnswerRules, tenant: str = "") -> OutputPlan:
    """Returns the plan of a completion's answers, which are text from the first token on.

    Raises:
        InvalidRequest, Overloaded: as :func:`plan_answers`.
    """
    max_bytes = service.checker.max_bytes
    answer = await _long_answer(service.checker, rules, tenant)
    plan = make_plan(
        Detected(), service.tokenizer, rules, max_grammar_bytes=max_bytes, answer=answer
    )
    return _counted(service, await _checked(service.checker, plan, rules, tenant))


def _counted(service: "OpenAIService", plan: OutputPlan) -> OutputPlan:
    if plan.kind:
        service.counts.guided_requests[plan.kind] += 1
    return plan


async def _long_answer(checker: GrammarChecker, rules: AnswerRules, tenant: str) -> Grammar | None:
    """The grammar of a long form, which is made where it is checked: the event loop goes on."""
    form = rules.long_form
    return None if form is None else await checker.form(form, rules.structured_param, tenant)


async def _checked(
    checker: GrammarChecker, plan: OutputPlan, rules: AnswerRules, tenant: str
) -> OutputPlan:
    """The plan, which says whether its grammars compile quickly."""
    guidance = plan.guidance
    if guidance is None or not guidance.grammars:
        return plan
    if not await checker.check(guidance.grammars, rules.grammar_param, tenant):
        return plan
    return replace(plan, guidance=replace(guidance, quick=True))


async def _allowed(
    make: Callable[[AnswerRules], Awaitable[OutputPlan]],
    checker: GrammarChecker,
    formats: Detected,
    rules: AnswerRules,
    tenant: str = "",
) -> OutputPlan:
    """Returns a plan whose grammars may run; schemas of functions are given up until they may."""
    while True:
        plan = await make(rules)
        try:
            return await _checked(checker, plan, rules, tenant)
        except InvalidRequest as refusal:
            loose = await _given_up(checker, formats.tool_guidance, rules, refusal, tenant)
            rules = replace(rules, loose=loose)


async def _given_up(
    checker: GrammarChecker,
    guidance: ToolGuidance,
    rules: AnswerRules,
    refusal: InvalidRequest,
    tenant: str,
) -> frozenset[str]:
    """Returns the functions whose schemas are not enforced, so that a refused request may run.

    These are the ones whose schema is refused alone; if all of them together are too much, all.

    Raises:
        InvalidRequest: the schema of a strict function is refused, and ``param`` is its path; or
            ``refusal``, if there is nothing to give up.
    """
    choice = rules.choice
    if rules.form is not None:  # the form may be what is refused
        raise refusal
    held = [
        tool
        for tool in choice.callable_tools(rules.tools)
        if tool.strict or choice.forced or guidance == "schema"
    ]
    if len(held) == 1 and held[0].strict:
        (tool,) = held
        said = refusal.message.removeprefix(rules.grammar_param)
        raise InvalidRequest(tool.path + said, tool.path, refusal.code)
    held.sort(key=lambda tool: not tool.strict)  # those that cannot be given up first
    refused: set[str] = set()
    for tool in held if len(held) > 1 and not rules.loose else ():
        if len(refused) == MOST_REFUSED:  # each may take seconds
            refused.clear()
            break
        text = arguments_grammar(tool)
        try:
            await checker.check([text] if text else [], tool.path, tenant)
        except InvalidRequest:
            if tool.strict:
                raise
            refused.add(tool.name)
    loose = frozenset(refused or (tool.name for tool in held if not tool.strict))
    if loose <= rules.loose:
        raise refusal
    return loose


_call_rules = lru_cache(KNOWN_TOOLS)(make_call_rules)  # of many tools: ten milliseconds


def make_plan(
    formats: Detected,
    tokenizer: Tokenizer,
    rules: AnswerRules,
    opening: str = "",
    earlier_calls: int = 0,
    max_grammar_bytes: int = MAX_BYTES,
    answer: Grammar | None = None,
) -> OutputPlan:
    """Returns the plan; its grammars are not checked yet. Otherwise as :func:`plan_answers`.

    Args:
        answer: of the form, if it is made already.
    """
    if rules.ask_nothing:
        return _free_plan(formats, tokenizer, rules, opening, earlier_calls)
    if formats.rules.one_call and rules.choice.parallel:
        rules = replace(rules, choice=replace(rules.choice, parallel=False))
    if rules.budget is not None and formats.reasoning is None:
        raise InvalidRequest(
            f"{rules.budget_param} needs a model whose reasoning is known; see --reasoning-parser.",
            rules.budget_param,
            "unsupported_parameter",
        )
    if rules.form is not None and answer is None:
        answer = answer_grammar(rules.form, rules.structured_param, tokenizer, max_grammar_bytes)
    calls = _call_rules(
        formats.tools,
        rules.tools,
        rules.choice,
        tokenizer,
        guidance=formats.tool_guidance,
        answer=answer,
        loose=rules.loose,
    )
    marks = call_marks(formats.tools if rules.tools else None, formats.reasoning, tokenizer)
    thinking = make_thinking(
        formats.reasoning,
        opening,
        tokenizer,
        budget=rules.budget,
        has_grammar=bool(calls.grammar),
        free_calls=calls.calls,
        calls=marks.values(),
    )
    guidance = build_guidance(grammar=calls.grammar, calls=calls, thinking=thinking)
    return OutputPlan(
        guidance=guidance,
        make_parser=_parser_of(
            formats, tokenizer, rules, opening, calls.forced, marks if calls.grammar else None
        ),
        unenforced=(
            *((rules.structured_param,) if rules.structured is not rules.form else ()),
            *(answer.unenforced if answer is not None else ()),
            *calls.unenforced,
        ),
        id_style=_id_style(formats),
        earlier_calls=earlier_calls,
        choice=rules.choice,
        tools={tool.name: tool for tool in rules.choice.callable_tools(rules.tools)},
        reasons=formats.reasoning is not None,
        kind=answer.kind if answer else "tools" if guidance and guidance.grammars else "",
        param=rules.grammar_param if guidance and guidance.grammars else "",
    )


def _free_plan(
    formats: Detected,
    tokenizer: Tokenizer,
    rules: AnswerRules,
    opening: str,
    earlier_calls: int,
) -> OutputPlan:
    """Returns the plan of answers that nothing guides; thoughts are read from them all the same."""
    return OutputPlan(
        make_parser=_parser_of(formats, tokenizer, rules, opening),
        id_style=_id_style(formats),
        earlier_calls=earlier_calls,
        choice=rules.choice,
        reasons=formats.reasoning is not None,
    )


def _id_style(formats: Detected) -> IdStyle:
    return "openai" if formats.tools is None else formats.tools.id_style


def _parser_of(
    formats: Detected,
    tokenizer: Tokenizer,
    rules: AnswerRules,
    opening: str,
    forced: str = "",
    ends_thoughts: Collection[str] | None = None,
) -> "Callable[[], OutputParser] | None":
    """Returns what makes a parser; None if answers are plain text."""
    callable_tools = rules.choice.callable_tools(rules.tools) if rules.tools else ()
    tools = formats.tools if callable_tools else None
    if tools is None and formats.reasoning is None and not forced:
        return None
    from rayfin.deployments.text.parsing.parser import OutputParser
    from rayfin.deployments.text.parsing.text_calls import TextCallParser

    custom = frozenset(tool.name for tool in callable_tools if tool.kind == "custom")
    return partial(
        partial(TextCallParser, custom) if custom else OutputParser,
        tools,
        formats.reasoning,
        functions={tool.name: tool.parameters for tool in callable_tools},
        starts_inside=thought_start(formats.reasoning, opening),
        forced=forced,
        # In a form they are spelled, and the answer is not read for them.
        special=tokenizer.special_texts if rules.form is None else frozenset(tokenizer.added_ids),
        ends_thoughts=ends_thoughts,
        cut_thoughts=rules.budget is not None,
    )
