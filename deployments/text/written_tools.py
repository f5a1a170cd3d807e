"""Tools and calls as text of messages, for templates that have no place for them."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.render import WrittenCall, render_calls
from rayfin.deployments.text.repair import SYSTEM, as_parts, joined

Message = dict[str, Any]
UNSAID = frozenset(("$ref", "$defs", "definitions", "allOf", "anyOf", "oneOf", "patternProperties"))
"""Keywords of parameters whose properties are not all of them."""


def write_tools(
    conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, row: ToolFormat
) -> list[Message]:
    """Returns checked messages with tools in the system message, and calls and results as text.

    Args:
        row: how calls are written.
    """
    messages: list[Message] = []
    for is_result, group in groupby(conversation, lambda message: message["role"] == "tool"):
        said = [_written(message, row) for message in group]
        if is_result:  # those of several calls are one message
            messages.append(joined(*said))
        elif tools:
            messages += [_reminded(message, row) for message in said]
        else:
            messages += said
    if not tools:
        return messages
    text: Any = tools_text(tools, row)
    if messages and messages[0]["role"] in SYSTEM:
        messages[0] = joined(messages[0], {"content": f"\n{text}"})
        return messages
    parts = any(isinstance(message["content"], list) for message in messages)
    return [{"role": "system", "content": as_parts(text) if parts else text}, *messages]


def tools_text(tools: Sequence[Mapping[str, Any]], row: ToolFormat) -> str:
    """Returns what a model has to know: what a function is for, and a call of it.

    SmolLM2-135M picks better out of descriptions before calls than out of a list of schemas. So
    parameters stand in the call, in the places of values.
    """
    parts = ["You can call functions."]
    for tool in tools:
        function = tool["function"]
        use = str(function.get("description") or f"use {function['name']}").strip().rstrip(".")
        call = WrittenCall(function["name"], _placeholders(function.get("parameters") or {}))
        use = use[:1].lower() + use[1:]
        parts.append(f"To {use}, write:\n{render_calls(row, [call])}")
    return "\n\n".join(parts)


def _placeholders(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in the place of values: their type where that is all, or else their schema."""
    properties, required = parameters.get("properties"), parameters.get("required")
    if not isinstance(properties, Mapping) or parameters.keys() & UNSAID:
        return {"arguments": parameters} if parameters else {}
    needed = required if isinstance(required, list) else []
    return {str(key): _placeholder(one, key in needed) for key, one in properties.items()}


def _placeholder(schema: Any, required: bool) -> Any:
    if isinstance(schema, Mapping) and set(schema) == {"type"} and isinstance(schema["type"], str):
        return schema["type"] if required else f"{schema['type']}, optional"
    if isinstance(schema, Mapping) and not required:
        return {**schema, "optional": True}
    return schema


def _reminded(message: Message, row: ToolFormat) -> Message:
    """Adds a sentence to a question: small models forget what the system message says.

    Each has it, not the last one alone: the prompt of the next turn begins with this one's.
    """
    mark = (*row.begins, "call")[0]
    asked = {"content": f"\nAnswer with a {mark} if a function helps."}
    return joined(message, asked) if message["role"] == "user" else message


def _written(message: Message, row: ToolFormat) -> Message:
    """Returns a message without calls, and without a role that only tools have."""
    if message["role"] == "tool":
        opened = joined({"role": "user", "content": "<tool_response>"}, message)
        return joined(opened, {"content": "</tool_response>"})
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    if not functions:
        return plain
    calls = []
    for one in functions:
        arguments = one["arguments"] if isinstance(one["arguments"], Mapping) else {}
        calls.append(WrittenCall(one["name"], arguments))
    return joined(plain, {"content": render_calls(row, calls)})
