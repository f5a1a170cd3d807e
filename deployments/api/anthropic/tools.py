"""Anthropic's tools, tool choice, thinking and output format as the rules of an answer."""

from collections.abc import Mapping
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.anthropic.bodies import PromptBody, unserved
from rayfin.deployments.generation.plan import AnswerRules
from rayfin.deployments.generation.prompts import thinking_variables
from rayfin.deployments.guidance.fields import AnswerFormat, read_response_format
from rayfin.deployments.guidance.tool_choice import ToolChoice
from rayfin.deployments.text.checks import (
    as_choice,
    as_object,
    as_string,
    required,
    wrong_type,
)

CHOICES = ("auto", "any", "tool", "none")
THINKING = ("enabled", "adaptive", "disabled")
DISPLAYS = ("summarized", "omitted")
EFFORTS = ("low", "medium", "high", "xhigh", "max")


def answer_rules(body: PromptBody) -> AnswerRules:
    """Returns what the request says of the form of its answer.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
    """
    tools = body.declared_tools.functions
    form = _format(body)
    return AnswerRules(
        tools=tools,
        choice=_choice(body.tool_choice, {tool.name for tool in tools}),
        structured=None if form is None else form.outputs,
        structured_param="output_config.format" if form is None else form.param,
        budget=_budget(body),
        budget_param="thinking.budget_tokens",
    )


def template_variables(body: PromptBody) -> dict[str, Any]:
    """Returns the variables of the chat template that control thinking.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
    """
    effort = (body.output_config or {}).get("effort")
    if effort is not None:
        as_choice(effort, EFFORTS, "output_config.effort")
    kind = _thinking(body)
    thinks = (
        {} if kind is None else dict.fromkeys(("enable_thinking", "thinking"), kind != "disabled")
    )
    return thinking_variables(thinks, effort)


def shows_thinking(body: PromptBody) -> bool:
    return (body.thinking or {}).get("display") != "omitted"


def _thinking(body: PromptBody) -> str | None:
    """Returns the type of ``thinking``, or None if the model decides."""
    if body.thinking is None:
        return None
    kind = as_choice(required(body.thinking, "type", "thinking"), THINKING, "thinking.type")
    display = body.thinking.get("display")
    if display is not None:
        as_choice(display, DISPLAYS, "thinking.display")
    return kind


def _budget(body: PromptBody) -> int | None:
    if _thinking(body) != "enabled" or body.thinking is None:
        return None
    path = "thinking.budget_tokens"
    budget = required(body.thinking, "budget_tokens", "thinking")
    if not isinstance(budget, int) or isinstance(budget, bool):
        raise wrong_type("a whole number", budget, path)
    if budget < 1:
        raise InvalidRequest(
            f"{path} must be at least 1, got {budget}.", path, "integer_below_min_value"
        )
    return budget


def _format(body: PromptBody) -> AnswerFormat | None:
    """Returns ``output_config.format``, or ``output_format``, its older name."""
    config = body.output_config or {}
    for name, value in config.items():
        if value is not None and name not in ("effort", "format"):
            raise unserved(f"output_config.{name[:64]}")
    forms = {"output_config.format": config.get("format"), "output_format": body.output_format}
    given = {path: form for path, form in forms.items() if form is not None}
    if len(given) > 1:
        raise InvalidRequest("output_format is output_config.format; set one.", "output_format")
    for path, form in given.items():
        kind = required(as_object(form, path), "type", path)
        as_choice(kind, ("json_schema",), f"{path}.type")
        return read_response_format(form, path, flat=True, named=False)
    return None


def _choice(choice: Mapping[str, Any] | None, names: set[str]) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    kind = as_choice(required(choice, "type", "tool_choice"), CHOICES, "tool_choice.type")
    single = choice.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise wrong_type("a boolean", single, "tool_choice.disable_parallel_tool_use")
    parallel = not single
    if kind == "none":
        return ToolChoice("none")
    if kind == "auto":
        return ToolChoice(parallel=parallel)
    if not names:
        raise InvalidRequest(f"tool_choice {kind} needs tools.", "tool_choice")
    if kind == "any":
        return ToolChoice("required", parallel=parallel)
    name = as_string(required(choice, "name", "tool_choice"), "tool_choice.name")
    if name not in names:
        raise InvalidRequest(
            f"tool_choice names {name[:64]!r}, which is not in tools.", "tool_choice.name"
        )
    return ToolChoice("required", name, parallel=parallel)
