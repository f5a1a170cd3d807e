"""Which rows of the tables a model writes, found by rendering its chat template."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.plugins import plugins
from rayfin.deployments.text.chat_template import ThinkingSwitch
from rayfin.deployments.text.messages import ContentFormat
from rayfin.deployments.text.parsing.derive import derive_row
from rayfin.deployments.text.parsing.format import (
    ReasoningField,
    ReasoningFormat,
    ToolFormat,
    ToolGuidance,
    with_suffix,
)
from rayfin.deployments.text.parsing.formats import (
    AUTO,
    NONE,
    TOOL_FORMATS,
    check_parsers,
    find_reasoning_format,
    find_tool_format,
    suffix_of,
    tool_rows,
)
from rayfin.deployments.text.parsing.template_probe import FIRST, TemplateProbe, called, find_rules
from rayfin.deployments.text.parsing.thoughts import (
    ThoughtsFound,
    find_reasoning,
    find_switch,
)
from rayfin.deployments.text.parsing.trials import CallTrials
from rayfin.deployments.text.repair import NO_RULES, TemplateRules
from rayfin.deployments.text.tokenizer import Tokenizer

FOR_TEXT = "hermes"  # the row for models whose template knows no tools: the most widespread one
FOR_ANY = "json"  # the row for models whose format is unknown; no template writes it


@dataclass(slots=True, frozen=True)
class Detected:
    """How a model writes calls and thoughts."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    arguments_as_text: bool = False  # the template takes earlier calls' arguments as JSON text
    content: ContentFormat = "string"  # of messages, as the template takes it
    writes_tools: bool = False  # into the system message: the template has no place for them
    why: str = ""  # a line for the log
    # Settings of the server, beside what was found:
    tool_guidance: ToolGuidance = "json"
    reasoning_field: ReasoningField = "both"  # of chat completions
    rules: TemplateRules = NO_RULES  # of the template, which messages are repaired for
    switch: ThinkingSwitch = ThinkingSwitch()

    @property
    def names(self) -> tuple[str | None, str | None]:
        """The rows' names, for metrics and logs."""
        tools, reasoning = self.tools, self.reasoning
        return (
            None if tools is None else tools.name,
            None if reasoning is None else reasoning.name,
        )


def detect(
    tokenizer: Tokenizer,
    chat_template: str | None = None,
    *,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    tool_guidance: ToolGuidance = "json",
    reasoning_field: ReasoningField = "both",
    content_format: Literal["auto", "string", "openai"] = "auto",
    plugin: Sequence[str] | None = None,
) -> Detected:
    """Returns the formats that the template writes. Takes a tenth of a second.

    Args:
        chat_template: replaces the model's template.
        tool_parser: "auto", "none", or the name of a row that is not looked for.
        reasoning_parser: the same.
        tool_guidance: of calls that are free to be made.
        reasoning_field: of chat completions.
        content_format: what the template gets as content; "auto" finds out what it takes.
        plugin: those of ``--plugin``; a format of theirs is taken in place of what is found.

    Raises:
        InvalidConfig: there is no row of this name, or a plugin returns none.
    """
    check_parsers(tool_parser, reasoning_parser)
    suffix = suffix_of(tokenizer.added_ids)
    thoughts = ThoughtsFound([], "the model has no chat template")
    content: ContentFormat = "string" if content_format == "auto" else content_format
    rules, switch = NO_RULES, ThinkingSwitch()
    without_place = False
    if chat_template is None and not tokenizer.inner.chat_template:
        tools = _named_tools(tool_parser, suffix)
        as_text, why = False, thoughts.why
    else:
        probe = TemplateProbe(tokenizer, chat_template)
        written = probe.render([called([FIRST], False, "")]) or ""
        suffix = suffix_of((written, *tokenizer.added_ids))
        thoughts, switch = find_reasoning(tokenizer, probe, suffix), find_switch(probe)
        both = [CallTrials(tokenizer, probe, thoughts.best(None), text) for text in (False, True)]
        content = probe.content_format() if content_format == "auto" else content_format
        without_place = not probe.shows_tools
        rows = [row for row in tool_rows(suffix) if row.name != FOR_ANY]
        tools, as_text, why = _find_tools(tokenizer, both, rows, tool_parser, without_place)
        rules = find_rules(probe, as_text)
    reasoning = thoughts.best(tools)
    if reasoning_parser != AUTO:
        named = find_reasoning_format(reasoning_parser)
        reasoning = None if named is None else with_suffix(named, suffix)
    thoughts_why = thoughts.why if reasoning_parser == AUTO else "as set"
    writes = without_place and tools is not None
    if writes:
        why = f"{why}; it has no place for tools: they are written into the system message"
    settings = (tool_guidance, reasoning_field)
    detected = Detected(tools, reasoning, as_text, content, writes, "", *settings, rules, switch)
    names = [name or NONE for name in detected.names]
    text = f"tool calls: {names[0]} ({why}); reasoning: {names[1]} ({thoughts_why})"
    return with_plugins(replace(detected, why=text), plugin)


def with_plugins(detected: Detected, named: Sequence[str] | None) -> Detected:
    """Returns ``detected`` with the formats of ``--plugin`` in place of those that it has.

    Raises:
        InvalidConfig: a function returns no format.
    """
    for make in plugins(named, "format"):
        row = make()
        if isinstance(row, ToolFormat):
            detected = replace(
                detected, tools=row, why=f"{detected.why}; calls of a plugin: {row.name}"
            )
        elif isinstance(row, ReasoningFormat):
            why = f"{detected.why}; reasoning of a plugin: {row.name}"
            detected = replace(detected, reasoning=row, why=why)
        else:
            message = f"plugin format must return a ToolFormat or a ReasoningFormat, got {row!r}"
            raise InvalidConfig(message, "plugin")
    return detected


def _find_tools(
    tokenizer: Tokenizer,
    both: list[CallTrials],
    rows: list[ToolFormat],
    name: str,
    without_place: bool,
) -> tuple[ToolFormat | None, bool, str]:
    """Returns the row, whether arguments are given to the template as text, and what shows it."""
    known, row = rows, find_tool_format(name)  # no row is named auto or none
    named = next((each for each in rows if row is not None and each.name == row.name), row)
    if named is not None:  # vLLM has one name for both of Mistral's formats
        family = f"{named.name}_"
        rows = [each for each in rows if each is named or each.name.startswith(family)]
    why = "the chat template writes calls so" if name == AUTO else "as set"
    for trials in both if rows else ():
        scores = [trials.score(row) for row in rows]
        best = max(range(len(rows)), key=lambda i: (scores[i], -i))
        if scores[best][0]:
            return None if name == NONE else rows[best], trials.as_text, why
    if name != AUTO:
        return named, False, why
    for trials in both:
        row = derive_row(trials)
        if row is not None:
            return row, trials.as_text, "derived from the calls of the chat template"
    text = TOOL_FORMATS[FOR_TEXT] if without_place else None
    if not any(trials.shows_a_call for trials in both):
        row = _by_tokens(tokenizer, known)
        if row is not None:
            return row, False, "its marks are tokens, and the chat template writes no calls"
        return text, False, "the chat template writes no calls"
    return text, False, "no format reads the calls of the chat template"


def _named_tools(name: str, suffix: str) -> ToolFormat | None:
    row = find_tool_format(name)  # no row is named auto or none
    return None if row is None else with_suffix(row, suffix)


def _by_tokens(tokenizer: Tokenizer, rows: list[ToolFormat]) -> ToolFormat | None:
    """Returns the only row of which a trigger is a token of this model, or None."""
    added = tokenizer.added_ids
    rows = [row for row in rows if any(mark in added for mark in row.triggers)]
    return rows[0] if len(rows) == 1 else None
