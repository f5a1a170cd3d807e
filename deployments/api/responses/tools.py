"""Tools, tool choice, reasoning and text format of a response as the rules of its answer."""

from collections.abc import Mapping
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.responses.bodies import ResponsePromptBody, unserved
from rayfin.deployments.api.responses.replies import Reasoning
from rayfin.deployments.generation.plan import AnswerRules
from rayfin.deployments.guidance.fields import AnswerFormat, read_response_format
from rayfin.deployments.guidance.tool_choice import FunctionTool, ToolChoice
from rayfin.deployments.http.json_body import rename_error_paths
from rayfin.deployments.text.checks import (
    as_choice,
    as_list,
    as_object,
    as_string,
    required,
    wrong_type,
)
from rayfin.deployments.text.messages import MAX_TOOLS, plain_tools

MODES = ("auto", "none", "required")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SUMMARIES = ("auto", "concise", "detailed")
OUR_PATHS = {".function.": "."}  # of chat tools -> of flat ones


def chat_tools(body: ResponsePromptBody) -> list[dict[str, Any]] | None:
    """Returns the tools as a chat template reads them; None if there are none.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong, such as tools[0].parameters.
    """
    if not body.tools:
        return None
    functions = []
    for i, written in enumerate(body.tools):
        tool = as_object(written, f"tools[{i}]")
        kind = as_string(required(tool, "type", f"tools[{i}]"), f"tools[{i}].type")
        if kind != "function":
            raise InvalidRequest(
                f"Tools of type {kind[:32]!r} are not supported by this version of Rayfin, only "
                "functions are.",
                f"tools[{i}].type",
                "unsupported_parameter",
            )
        names = ("name", "description", "parameters")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        functions.append({"type": "function", "function": function})
    with rename_error_paths(OUR_PATHS):
        return plain_tools(functions)


def answer_rules(body: ResponsePromptBody) -> AnswerRules:
    """Returns what the request says of the form of its answer.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
    """
    tools = tuple(
        FunctionTool(
            name=tool["function"]["name"],
            parameters=tool["function"].get("parameters") or {},
            strict=_strict(written, f"tools[{i}].strict"),
            path=f"tools[{i}].parameters",
        )
        for i, (tool, written) in enumerate(
            zip(chat_tools(body) or (), body.tools or (), strict=True)
        )
    )
    form = _format(body)
    parallel = body.parallel_tool_calls is not False
    return AnswerRules(
        tools=tools,
        choice=_choice(body.tool_choice, {tool.name for tool in tools}, parallel),
        structured=None if form is None else form.outputs,
        structured_param="text.format" if form is None else form.param,
    )


def template_variables(body: ResponsePromptBody) -> dict[str, Any]:
    """Returns the chat template's variables; ``chat_template_kwargs`` come last.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
    """
    effort = asked_reasoning(body).effort
    asked = {} if effort is None else {"reasoning_effort": effort}
    thinks = {} if effort is None else {"enable_thinking": effort != "none"}
    return {**asked, **thinks, **(body.chat_template_kwargs or {})}


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


def _choice(choice: object, names: set[str], parallel: bool) -> ToolChoice:
    path = "tool_choice"
    if choice is None or isinstance(choice, str):
        mode: Any = "auto" if choice is None else as_choice(choice, MODES, path)
        if mode == "required" and not names:
            raise InvalidRequest("tool_choice required needs tools.", path)
        return ToolChoice(mode, parallel=parallel)
    if not isinstance(choice, Mapping):
        raise wrong_type("a string or an object", choice, path)
    kind = as_choice(required(choice, "type", path), ("function", "allowed_tools"), f"{path}.type")
    if not names:
        raise InvalidRequest("tool_choice needs tools.", path)
    if kind == "function":
        name = _name(choice, names, path)
        return ToolChoice("required", name, parallel=parallel)
    mode = as_choice(required(choice, "mode", path), ("auto", "required"), f"{path}.mode")
    listed = as_list(required(choice, "tools", path), f"{path}.tools", MAX_TOOLS)
    allowed = set()
    for i, written in enumerate(listed):
        where = f"{path}.tools[{i}]"
        tool = as_object(written, where)
        as_choice(required(tool, "type", where), ("function",), f"{where}.type")
        allowed.add(_name(tool, names, where))
    return ToolChoice(mode, allowed=frozenset(allowed), parallel=parallel)


def _name(value: Mapping[str, Any], names: set[str], path: str) -> str:
    name = as_string(required(value, "name", path), f"{path}.name")
    if name not in names:
        raise InvalidRequest(
            f"tool_choice names {name[:64]!r}, which is not in tools.", f"{path}.name"
        )
    return name


def _strict(tool: Mapping[str, Any], path: str) -> bool:
    strict = tool.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type("a boolean", strict, path)
    return bool(strict)
