"""Anthropic's tools, tool choice, thinking and output format as the rules of an answer."""

from collections.abc import Collection, Mapping
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.anthropic.bodies import PromptBody
from rayfin.deployments.generation.plan import AnswerRules
from rayfin.deployments.generation.prompts import thinking_variables
from rayfin.deployments.generation.service import OpenAIService
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


def answer_rules(body: PromptBody, *, thinks: bool = True) -> AnswerRules:
    """Returns what the request says of the form of its answer.

    Args:
        thinks: the model's thoughts are known; those of others have no budget.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
    """
    tools = body.offered_tools.functions
    form = _format(body)
    budget = _budget(body)
    return AnswerRules(
        tools=tools,
        choice=_choice(body.tool_choice, {tool.name for tool in tools}, body.hosted_tools),
        structured=None if form is None else form.outputs,
        structured_param="output_config.format" if form is None else form.param,
        budget=budget if thinks else None,
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


def ignored_fields(body: PromptBody, service: OpenAIService) -> list[str]:
    """Returns the paths of what a body says without effect on this model's answer."""
    thinks = service.formats.reasoning is not None
    thinking, config = body.thinking or {}, body.output_config or {}
    names = [f"output_config.{name}" for name in config if name not in ("effort", "format")]
    if thinking.get("budget_tokens") is not None and not thinks:
        names.append("thinking.budget_tokens")
    if thinking.get("display") not in (None, *DISPLAYS):
        names.append("thinking.display")
    return [*body.ignored_fields(), *names]


def shows_thinking(body: PromptBody) -> bool:
    return (body.thinking or {}).get("display") != "omitted"


def _thinking(body: PromptBody) -> str | None:
    """Returns the type of ``thinking``, or None if the model decides."""
    if body.thinking is None:
        return None
    kind = as_choice(required(body.thinking, "type", "thinking"), THINKING, "thinking.type")
    display = body.thinking.get("display")
    if display is not None:
        as_string(display, "thinking.display")  # one that is not known shows all
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
    forms = {"output_config.format": config.get("format"), "output_format": body.output_format}
    given = {path: form for path, form in forms.items() if form is not None}
    if len(given) > 1:
        raise InvalidRequest("output_format is output_config.format; set one.", "output_format")
    for path, form in given.items():
        kind = required(as_object(form, path), "type", path)
        as_choice(kind, ("json_schema",), f"{path}.type")
        return read_response_format(form, path, flat=True, named=False)
    return None


def _choice(
    choice: Mapping[str, Any] | None, names: set[str], left_out: Collection[str]
) -> ToolChoice:
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
    if kind == "tool" and str(choice.get("name")) in left_out or left_out and not names:
        return ToolChoice(parallel=parallel)  # what is forced is no tool of the client's
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
