"""Request bodies of Anthropic's API."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.bodies import GenerationBody
from rayfin.deployments.generation.members import check_members, ignored_members
from rayfin.deployments.guidance.tools import DeclaredTools, WrittenTool, declared_tools
from rayfin.deployments.http.json_body import rename_error_params, rename_error_paths
from rayfin.deployments.text.checks import as_object, as_string, missing, required

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
        """Refuses what would change the meaning of an answer, and is not served.

        Raises:
            InvalidRequest: ``param`` names the field.
        """
        if (thread := (self.model_extra or {}).get("thread")) is not None:
            raise _no_thread(thread)
        check_members("messages", self.model_extra)
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

    @cached_property
    def offered_tools(self) -> DeclaredTools:
        """Returns those that may be called: a deferred one where the conversation refers to it."""
        every = self.declared_tools
        if not any(tool.deferred for tool in every.functions):
            return every
        known = referenced_tools(self.messages)
        offered = [tool for tool in every.functions if not tool.deferred or tool.name in known]
        return replace(every, functions=tuple(offered))

    def definitions(self) -> dict[str, Any]:
        """Returns the tools that the messages refer to as functions of a chat, by their names."""
        known = referenced_tools(self.messages)
        written = [tool.function for tool in message_tools(self.tools or ())] if known else []
        names = [tool["function"]["name"] for tool in written if tool]
        return dict(zip(names, filter(None, written), strict=True))

    @property
    def hosted_tools(self) -> set[str]:
        """Returns the names of tools that are left out."""
        tools = [tool for tool in self.tools or () if isinstance(tool, Mapping)]
        hosted = (tool for tool in tools if (tool.get("type") or "custom") != "custom")
        return {str(tool.get("name")) for tool in hosted}

    def ignored_fields(self) -> list[str]:
        extra = ignored_members("messages", self.model_extra)
        return extra + self.declared_tools.ignored_fields()


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
    """Reads the tools of a request; those of the server are left out."""
    functions: list[WrittenTool] = []
    for i, written in enumerate(tools):
        path = f"tools[{i}]"
        tool = as_object(written, path)
        kind = as_string(tool.get("type") or "custom", f"{path}.type")
        if kind != "custom":
            functions.append(WrittenTool({}, path, "", "unserved", called=kind))
            continue
        function = {
            "name": required(tool, "name", path),
            "description": tool.get("description"),
            "parameters": required(tool, "input_schema", path),
            "strict": tool.get("strict"),
        }
        given = {name: value for name, value in function.items() if value is not None}
        shown = {"type": "function", "function": given}
        deferred = tool.get("defer_loading") is True
        functions.append(WrittenTool(shown, path, ".input_schema", deferred=deferred))
    return functions


def referenced_tools(messages: object) -> set[str]:
    """Returns the names in the tool references of unchecked messages."""
    return {
        block["tool_name"]
        for block in _objects(messages, "content", "content")
        if block.get("type") == "tool_reference" and isinstance(block.get("tool_name"), str)
    }


def _objects(value: object, *names: str) -> Iterator[Mapping[str, Any]]:
    """Yields the objects of a list, or those of the lists in their members of these names."""
    for item in value if isinstance(value, list) else ():
        if isinstance(item, Mapping) and names:
            yield from _objects(item.get(names[0]), *names[1:])
        elif isinstance(item, Mapping):
            yield item


def _no_thread(thread: object) -> InvalidRequest:
    """Refuses in the words by which Anthropic's packages send whole conversations instead."""
    refusal = InvalidRequest(
        "Threads are not served: send the whole conversation.", "thread", "unsupported_parameter"
    )
    continued = isinstance(thread, Mapping) and thread.get("type") == "continue"
    refusal.details = (
        {"error_code": "thread_not_found"}
        if continued
        else {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    )
    return refusal
