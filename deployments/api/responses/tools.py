"""Tools, tool choice, reasoning and text format of a response as the rules of its answer."""

from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.responses.bodies import ResponsePromptBody, unserved
from rayfin.deployments.api.responses.replies import Reasoning
from rayfin.deployments.generation.plan import AnswerRules
from rayfin.deployments.generation.prompts import thinking_variables
from rayfin.deployments.guidance.fields import AnswerFormat, read_response_format
from rayfin.deployments.guidance.tool_choice import function_tools, read_tool_choice
from rayfin.deployments.http.json_body import rename_error_paths
from rayfin.deployments.text.checks import (
    as_choice,
    as_object,
    as_string,
    required,
)
from rayfin.deployments.text.messages import plain_tools

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SUMMARIES = ("auto", "concise", "detailed")
OUR_PATHS = {".function.": "."}  # of chat tools -> of flat ones


def chat_tools(body: ResponsePromptBody) -> list[dict[str, Any]] | None:
    """Returns the tools as a chat template reads them; None if there are none.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong, such as tools[0].parameters.
    """
    with rename_error_paths(OUR_PATHS):
        tools = plain_tools(_functions(body)) if body.tools else None
    for tool in tools or ():
        tool["function"].pop("strict", None)  # of the grammar only
    return tools


def _functions(body: ResponsePromptBody) -> list[dict[str, Any]]:
    """Returns the tools in the form of chat completions."""
    functions = []
    for i, written in enumerate(body.tools or ()):
        tool = as_object(written, f"tools[{i}]")
        kind = as_string(required(tool, "type", f"tools[{i}]"), f"tools[{i}].type")
        if kind != "function":
            raise InvalidRequest(
                f"Tools of type {kind[:32]!r} are not supported by this version of Rayfin, only "
                "functions are.",
                f"tools[{i}].type",
                "unsupported_parameter",
            )
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        functions.append({"type": "function", "function": function})
    return functions


def answer_rules(body: ResponsePromptBody) -> AnswerRules:
    """Returns what the request says of the form of its answer.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
    """
    with rename_error_paths(OUR_PATHS):
        tools = function_tools(_functions(body), ".parameters") if body.tools else ()
    form = _format(body)
    asked = None if body.tool_choice == "auto" else body.tool_choice
    return AnswerRules(
        tools=tools,
        choice=read_tool_choice(asked, tools, parallel=body.parallel_tool_calls, flat=True),
        structured=None if form is None else form.outputs,
        structured_param="text.format" if form is None else form.param,
    )


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
        for tool in body.tools or ()
    ]


def _format(body: ResponsePromptBody) -> AnswerFormat | None:
    written = (body.text or {}).get("format")
    return None if written is None else read_response_format(written, "text.format", flat=True)
