"""Which functions a request declares, and how its answer may call them: the same for all APIs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(slots=True, frozen=True)
class FunctionTool:
    """A function that the model may call."""

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
