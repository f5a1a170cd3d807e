"""Tools and calls as text of messages, for templates that have no place for them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.render import WrittenCall, json_text, render_calls
from rayfin.deployments.text.repair import SYSTEM, as_parts, joined

EXAMPLE = WrittenCall("NAME", {"ARGUMENT": "VALUE"})
Message = dict[str, Any]


def write_tools(
    conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, row: ToolFormat
) -> list[Message]:
    """Returns checked messages with tools in the system message, and calls and results as text.

    Args:
        row: how calls are written.
    """
    messages: list[Message] = []
    before = ""
    for message in conversation:
        written = _written(message, row)
        if message["role"] == before == "tool":  # results of several calls are one message
            messages[-1] = joined(messages[-1], written)
        else:
            messages.append(written)
        before = message["role"]
    if not tools:
        return messages
    text: Any = tools_text(tools, row)
    if messages and messages[0]["role"] in SYSTEM:
        messages[0] = joined(messages[0], {"content": f"\n{text}"})
        return messages
    parts = any(isinstance(message["content"], list) for message in messages)
    return [{"role": "system", "content": as_parts(text) if parts else text}, *messages]


def tools_text(tools: Sequence[Mapping[str, Any]], row: ToolFormat) -> str:
    """Returns what a model has to know: names, descriptions, parameters, the form of a call."""
    keys = ("name", "description", "parameters")
    functions = [tool["function"] for tool in tools]
    listed = [json_text({key: one[key] for key in keys if one.get(key)}) for one in functions]
    return "\n".join(
        (
            "You can call these functions to answer the user:",
            *listed,
            "To call a function, write its name and arguments in this form, and nothing else:",
            render_calls(row, [EXAMPLE]),
        )
    )


def _written(message: Message, row: ToolFormat) -> Message:
    """A message without calls, and without a role that only tools have."""
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
