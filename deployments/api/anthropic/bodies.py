"""Request bodies of Anthropic's API."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.bodies import GenerationBody
from rayfin.deployments.guidance.tools import DeclaredTools, WrittenTool, declared_tools
from rayfin.deployments.http.json_body import rename_error_params, rename_error_paths
from rayfin.deployments.text.checks import as_object, as_string, is_empty, missing, required

UNSERVED = ("container", "context_management", "mcp_servers")  # refused unless empty
MAX_TEMPERATURE = 1.0
MAX_TOOL_NAME = 128  # characters
OUR_PATHS = {".function.parameters": ".input_schema", ".function.": "."}  # of chat tools -> theirs
OUR_NAMES = {"stop": "stop_sequences"}


class PromptBody(BaseModel):
    """The fields of a prompt; None is the same as leaving a field out."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    messages: Any = None
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format
    cache_control: dict[str, Any] | None = None  # see cache_control.py

    def check(self) -> None:
        """Rejects fields that are not supported.

        Raises:
            InvalidRequest: ``param`` names the field.
        """
        extra = self.model_extra or {}
        for name in UNSERVED:
            if not is_empty(extra.get(name)):
                raise unserved(name)
        if self.messages is None:
            raise missing("messages")

    @cached_property
    def declared_tools(self) -> DeclaredTools:
        """The checked tools, read once.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong, such as tools[0].input_schema.
        """
        with rename_error_paths(OUR_PATHS):
            return declared_tools(self.tools, message_tools, MAX_TOOL_NAME)

    def ignored_fields(self) -> list[str]:
        return [name for name in self.model_extra or {} if name not in UNSERVED]


class MessagesRequest(PromptBody):
    max_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Returns the checked sampling settings; ``defaults`` fill the fields that are left out.

        Raises:
            InvalidRequest: a value out of range.
        """
        if self.max_tokens is None:
            raise missing("max_tokens")
        budget = (self.thinking or {}).get("budget_tokens")
        if isinstance(budget, int) and budget >= self.max_tokens:
            raise InvalidRequest(
                f"max_tokens must be greater than thinking.budget_tokens, which is {budget}.",
                "thinking.budget_tokens",
                "integer_above_max_value",
            )
        if self.temperature is not None and self.temperature > MAX_TEMPERATURE:
            raise InvalidRequest(
                f"temperature must be in [0, {MAX_TEMPERATURE:g}], got {self.temperature}.",
                "temperature",
                "decimal_above_max_value",
            )
        shared = GenerationBody(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
        )
        with rename_error_params(OUR_NAMES):
            return shared.sampling_params(defaults, self.max_tokens)


def message_tools(tools: Sequence[Any]) -> list[WrittenTool]:
    """Reads the tools of a request."""
    functions = []
    for i, written in enumerate(tools):
        path = f"tools[{i}]"
        tool = as_object(written, path)
        kind = as_string(tool.get("type") or "custom", f"{path}.type")
        if kind != "custom":
            raise InvalidRequest(
                f"Tools of type {kind[:32]!r} are not supported by this version of Rayfin, only "
                "functions of the client's are.",
                f"{path}.type",
                "unsupported_parameter",
            )
        function = {
            "name": required(tool, "name", path),
            "description": tool.get("description"),
            "parameters": required(tool, "input_schema", path),
            "strict": tool.get("strict"),
        }
        given = {name: value for name, value in function.items() if value is not None}
        shown = {"type": "function", "function": given}
        functions.append(WrittenTool(shown, path, ".input_schema"))
    return functions


def unserved(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is not supported by this version of Rayfin.", name, "unsupported_parameter"
    )
