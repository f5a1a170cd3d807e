"""Which functions a request declares, and how its answer may call them: the same for all APIs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from pydantic_core import to_json

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.text.checks import (
    MAX_NAME,
    as_choice,
    as_list,
    as_object,
    as_string,
    missing,
    required,
    wrong_type,
)
from rayfin.deployments.text.messages import MAX_TOOLS, PlainTools, plain_tools

MAX_TOOLS_SIZE = 256 * 1024  # characters of JSON
KNOWN_TOOLS = 64  # lists of tools that were read lately: an agent sends its own each time
WORDS = ("none", "auto", "required")


@dataclass(slots=True, frozen=True, eq=False)
class FunctionTool:
    """A function that the model may call. The same tools give the same objects while known."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema; {} if none
    strict: bool = False  # its arguments are held to the schema, with ``auto`` as well
    path: str = ""  # of its schema in the request, for errors: tools[0].function.parameters


@dataclass(slots=True, frozen=True)
class ToolChoice:
    """Whether and what the answer calls."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None  # with "required": exactly one call, of this function
    allowed: frozenset[str] | None = None  # names; None allows all
    parallel: bool = True  # False: at most one call

    @property
    def forced(self) -> bool:
        return self.mode == "required"

    def callable_tools(self, tools: tuple[FunctionTool, ...]) -> tuple[FunctionTool, ...]:
        """Returns those of ``tools`` that the answer may call."""
        if self.mode == "none":
            return ()
        names = self.allowed if self.name is None else {self.name}
        return tuple(tool for tool in tools if names is None or tool.name in names)


PARAMETERS = ".function.parameters"  # of a tool of a chat
ChatForm = Callable[[Sequence[Any]], list[dict[str, Any]]]
"""From the tools of an API to those of a chat."""


@dataclass(slots=True, frozen=True, eq=False)
class DeclaredTools:
    """The tools of a request. The same tools give the same object while known."""

    functions: tuple[FunctionTool, ...] = ()  # as answers are held to them
    shown: PlainTools | None = None  # as a chat template reads them; None if there are none


NO_TOOLS = DeclaredTools()


def declared_tools(
    tools: object,
    schema: str = PARAMETERS,
    chat_form: ChatForm | None = None,
    longest_name: int = MAX_NAME,
) -> DeclaredTools:
    """Reads and checks a request's ``tools``; those that are known take microseconds.

    An empty list is the same as none.

    Args:
        schema: where a tool of the API has its schema, for errors of that.
        chat_form: a function of a module; None: the tools have the form of a chat. Templates see
            no ``strict`` in what it has returned.
        longest_name: characters in a tool's name.

    Raises:
        InvalidRequest: ``param`` is the path of the invalid value, such as tools[0].function.name.
    """
    if tools is None or tools in ([], ()):
        return NO_TOOLS
    try:
        text = to_json(tools)  # several times as fast as the standard library's
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"'tools' must be JSON: {error}.", "tools", "invalid_type") from error
    return _read(text, schema, chat_form, longest_name)


@lru_cache(KNOWN_TOOLS)
def _read(text: bytes, schema: str, chat_form: ChatForm | None, longest_name: int) -> DeclaredTools:
    characters = len(text.decode("utf-8"))
    if characters > MAX_TOOLS_SIZE:
        raise InvalidRequest(
            f"'tools' may have {MAX_TOOLS_SIZE} characters of JSON, got {characters}.",
            "tools",
            "string_above_max_length",
        )
    tools = json.loads(text)
    plain = plain_tools(tools if chat_form is None else chat_form(tools), longest_name)
    found = []
    for i, tool in enumerate(plain):
        function = tool["function"]
        parameters = function.get("parameters") or {}
        strict = function.get("strict") is True
        found.append(FunctionTool(function["name"], parameters, strict, f"tools[{i}]{schema}"))
        if chat_form is not None:
            function.pop("strict", None)
    return DeclaredTools(tuple(found), plain)


def read_tool_choice(
    value: object,
    tools: Sequence[FunctionTool],
    *,
    parallel: bool | None = None,
    flat: bool = False,
) -> ToolChoice:
    """Reads OpenAI's ``tool_choice``.

    Args:
        parallel: ``parallel_tool_calls``; None is True.
        flat: names stand beside the type, as in Responses, and not in an object of its own.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
    """
    many = parallel is not False
    if value is None or value == "none":
        mode: Any = "none" if value == "none" or not tools else "auto"
        return ToolChoice(mode, parallel=many)
    if not tools:
        raise InvalidRequest(
            "'tool_choice' is only allowed when 'tools' are specified.", "tool_choice"
        )
    if isinstance(value, str):
        word = as_choice(value, WORDS, "tool_choice")
        return ToolChoice("auto" if word == "auto" else "required", parallel=many)
    if not isinstance(value, Mapping):
        raise wrong_type("a string or an object", value, "tool_choice")
    if value.get("type") is None:
        raise InvalidRequest(
            "'tool_choice' has no type.", "tool_choice", "missing_required_parameter"
        )
    kinds = ("function", "allowed_tools")
    if as_choice(value["type"], kinds, "tool_choice.type") == "function":
        name = _name(value, "tool_choice", tools, flat)
        return ToolChoice("required", name, parallel=many)
    given, path = value, "tool_choice"
    if not flat:
        path = "tool_choice.allowed_tools"
        given = as_object(required(value, "allowed_tools", "tool_choice"), path)
    mode = as_choice(required(given, "mode", path), WORDS[1:], f"{path}.mode")
    listed = as_list(required(given, "tools", path), f"{path}.tools", MAX_TOOLS)
    names = [
        _name(as_object(tool, f"{path}.tools[{i}]"), f"{path}.tools[{i}]", tools, flat)
        for i, tool in enumerate(listed)
    ]
    return ToolChoice(mode, allowed=frozenset(names), parallel=many)


def _name(value: Mapping[str, Any], path: str, tools: Sequence[FunctionTool], flat: bool) -> str:
    """The name of a declared function in ``{"type": "function", ...}``."""
    as_choice(required(value, "type", path), ("function",), f"{path}.type")
    if not flat:
        path = f"{path}.function"
        if value.get("function") is None:
            raise missing(path)
        value = as_object(value["function"], path)
    name = as_string(required(value, "name", path), f"{path}.name")
    if all(tool.name != name for tool in tools):
        raise InvalidRequest(
            f"Tool choice {name[:64]!r} not found in 'tools' parameter.", f"{path}.name"
        )
    return name
