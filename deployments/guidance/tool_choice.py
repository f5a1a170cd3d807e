"""How an answer may call the tools of its request: the same for all APIs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.tools import Tool
from rayfin.deployments.text.checks import (
    as_choice,
    as_list,
    as_object,
    as_string,
    missing,
    required,
    wrong_type,
)
from rayfin.deployments.text.messages import MAX_TOOLS

WORDS = ("none", "auto", "required")
NAMED = ("function", "custom")
"""Types of tools that a choice may name."""


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

    def callable_tools(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        """Returns those of ``tools`` that the answer may call."""
        if self.mode == "none":
            return ()
        names = self.allowed if self.name is None else {self.name}
        return tuple(tool for tool in tools if names is None or tool.name in names)


def read_tool_choice(
    value: object,
    tools: Sequence[Tool],
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
    kinds = (*NAMED, "allowed_tools")
    if as_choice(value["type"], kinds, "tool_choice.type") != "allowed_tools":
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


def _name(value: Mapping[str, Any], path: str, tools: Sequence[Tool], flat: bool) -> str:
    """Returns the name of a declared tool in ``{"type": "function", ...}``."""
    kind = as_choice(required(value, "type", path), NAMED, f"{path}.type")
    if not flat:
        path = f"{path}.{kind}"
        if value.get(kind) is None:
            raise missing(path)
        value = as_object(value[kind], path)
    name, namespace = (
        as_string(required(value, "name", path), f"{path}.name"),
        value.get("namespace"),
    )
    meant = [
        tool.name
        for tool in tools
        if name == (tool.called or tool.name) and namespace in (None, tool.namespace)
    ]
    if len(meant) != 1:
        said = "is in several namespaces" if meant else "not found in 'tools' parameter"
        raise InvalidRequest(f"Tool choice {name[:64]!r} {said}.", f"{path}.name")
    return meant[0]
