"""Tools, tool choice, reasoning and text format of a response as the rules of its answer."""

from collections.abc import Sequence
from typing import Any

from rayfin.deployments.api.responses.bodies import ResponsePromptBody
from rayfin.deployments.api.responses.replies import Item, Reasoning, ToolSearchOutput
from rayfin.deployments.generation.members import unserved
from rayfin.deployments.generation.plan import AnswerRules
from rayfin.deployments.generation.prompts import thinking_variables
from rayfin.deployments.guidance.fields import AnswerFormat, read_response_format
from rayfin.deployments.guidance.tool_choice import read_tool_choice
from rayfin.deployments.guidance.tools import Tool, declared_tools, flat_tools
from rayfin.deployments.text.checks import as_choice

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SUMMARIES = ("auto", "concise", "detailed")


def answer_rules(body: ResponsePromptBody, items: Sequence[Item] = ()) -> AnswerRules:
    """Returns what the request says of the form of its answer.

    Args:
        items: of the whole conversation: tools that the client has found may be called too.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
    """
    tools = _callable_tools(body, items)
    form = _format(body)
    asked = None if body.tool_choice == "auto" else body.tool_choice
    return AnswerRules(
        tools=tools,
        choice=read_tool_choice(asked, tools, parallel=body.parallel_tool_calls, flat=True),
        structured=None if form is None else form.outputs,
        structured_param="text.format" if form is None else form.param,
    )


def _callable_tools(body: ResponsePromptBody, items: Sequence[Item]) -> tuple[Tool, ...]:
    """Returns the tools that templates see, and those that came by searches."""
    tools: dict[str, Tool] = {}  # a later search may find a tool again
    for item in items:
        if isinstance(item, ToolSearchOutput):
            tools |= {t.name: t for t in declared_tools(item.tools, flat_tools).functions}
    tools |= {tool.name: tool for tool in body.declared_tools.functions if not tool.deferred}
    return tuple(tools.values())


def template_variables(body: ResponsePromptBody) -> dict[str, Any]:
    """Returns the chat template's variables.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
    """
    return thinking_variables(body.chat_template_kwargs, asked_reasoning(body).effort)


def asked_reasoning(body: ResponsePromptBody) -> Reasoning:
    """Returns the checked ``reasoning`` of a request. No summary is ever written.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
    """
    given = {name: value for name, value in (body.reasoning or {}).items() if value is not None}
    for name, value in given.items():
        if name not in ("effort", "summary", "generate_summary"):
            raise unserved(f"reasoning.{name[:64]}")
        as_choice(value, EFFORTS if name == "effort" else SUMMARIES, f"reasoning.{name}")
    return Reasoning(effort=given.get("effort"))


def repeated_tools(body: ResponsePromptBody) -> list[dict[str, Any]]:
    """Returns the tools as the response repeats them."""
    return [
        {
            "type": "function",
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": tool.get("parameters"),
            "strict": bool(tool.get("strict")),
        }
        if tool["type"] == "function"
        else tool
        for tool in body.tools or ()
    ]


def _format(body: ResponsePromptBody) -> AnswerFormat | None:
    written = (body.text or {}).get("format")
    return None if written is None else read_response_format(written, "text.format", flat=True)
