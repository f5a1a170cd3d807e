"""Chat messages and tools as OpenAI clients write them, checked and made plain for a template."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rayfin.actors.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 2048
MAX_TOOLS = 128  # tools of a request, and tool calls of a message
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
EXTRAS = ("name", "tool_call_id", "reasoning_content", "reasoning")  # passed on where they are text


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Messages with a string as content, text parts joined by newlines as vLLM does.

    The arguments of earlier tool calls become objects, since templates print them as JSON;
    arguments that are no JSON object stay the text they are.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong, such as messages[0].role.
    """
    listed = _list(messages, "messages", MAX_MESSAGES)
    return [_message(message, f"messages[{i}]") for i, message in enumerate(listed)]


def plain_tools(tools: object) -> list[dict[str, Any]]:
    """The function tools of a request.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong, such as tools[0].function.name.
    """
    listed = _list(tools, "tools", MAX_TOOLS)
    names: set[str] = set()
    for i, tool in enumerate(listed):
        path = f"tools[{i}]"
        _choice(_required(_object(tool, path), "type", path), ("function",), f"{path}.type")
        function = _object(_required(tool, "function", path), f"{path}.function")
        name = _name(_required(function, "name", f"{path}.function"), f"{path}.function.name")
        if name in names:
            raise InvalidRequest(f"Two tools have the name {name!r}.", f"{path}.function.name")
        names.add(name)
        if function.get("description") is not None:
            _string(function["description"], f"{path}.function.description")
        if function.get("parameters") is not None:
            _object(function["parameters"], f"{path}.function.parameters")
    return [dict(tool) for tool in listed]


def _message(message: object, path: str) -> dict[str, Any]:
    message = _object(message, path)
    role = _choice(_required(message, "role", path), ROLES, f"{path}.role")
    calls = message.get("tool_calls")
    plain: dict[str, Any] = {"role": role}
    if message.get("content") is not None:
        plain["content"] = _content(message["content"], f"{path}.content")
    elif role == "assistant":
        plain["content"] = ""
    else:
        raise _missing(f"{path}.content")
    for name in EXTRAS:
        if message.get(name) is not None:
            plain[name] = _string(message[name], f"{path}.{name}")
    if "name" in plain:
        _name(plain["name"], f"{path}.name")
    if role == "tool":
        _required(plain, "tool_call_id", path)
    if calls and role == "assistant":
        listed = _list(calls, f"{path}.tool_calls", MAX_TOOLS)
        plain["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(listed)
        ]
    return plain


def _content(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(_list(content, path, MAX_MESSAGES)):
        where = f"{path}[{i}]"
        kind = _string(_required(_object(part, where), "type", where), f"{where}.type")
        field = {"text": "text", "input_text": "text", "refusal": "refusal"}.get(kind)
        if field is None:
            raise InvalidRequest(
                f"Content of type {kind[:32]!r} is not supported: this model reads text only.",
                f"{where}.type",
                "unsupported_content",
            )
        texts.append(_string(_required(part, field, where), f"{where}.{field}"))
    return "\n".join(texts)


def _tool_call(call: object, path: str) -> dict[str, Any]:
    call = _object(call, path)
    if call.get("type") is not None:
        _choice(call["type"], ("function",), f"{path}.type")
    function = _object(_required(call, "function", path), f"{path}.function")
    name = _name(_required(function, "name", f"{path}.function"), f"{path}.function.name")
    written = function.get("arguments")
    arguments: object = written if isinstance(written, Mapping) else {}
    if isinstance(written, str):
        try:
            arguments = json.loads(written) if written else {}
        except (ValueError, RecursionError):
            arguments = written
        if not isinstance(arguments, dict):
            arguments = written
    elif written is not None and not isinstance(written, Mapping):
        raise _wrong_type("a string", written, f"{path}.function.arguments")
    plain = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        plain["id"] = _string(call["id"], f"{path}.id")
    return plain


def _required(value: Mapping[str, Any], name: str, path: str) -> Any:
    if value.get(name) is None:
        raise _missing(f"{path}.{name}")
    return value[name]


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{path}'.", path, "missing_required_parameter"
    )


def _wrong_type(expected: str, value: object, path: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{path}' must be {expected}, got {type(value).__name__}.", path, "invalid_type"
    )


def _object(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type("an object", value, path)
    return value


def _string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise _wrong_type("a string", value, path)
    return value


def _name(value: object, path: str) -> str:
    name = _string(value, path)
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"'{path}' may hold 1 to 64 of the characters A-Z a-z 0-9 _ - and dot.", path
        )
    return name


def _choice(value: object, choices: Sequence[str], path: str) -> str:
    word = _string(value, path)
    if word not in choices:
        raise InvalidRequest(
            f"'{path}' must be one of {', '.join(choices)}, got {word[:32]!r}.", path
        )
    return word


def _list(value: object, path: str, most: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _wrong_type("a list", value, path)
    if not value:
        raise InvalidRequest(f"'{path}' must not be empty.", path, "empty_array")
    if len(value) > most:
        raise InvalidRequest(
            f"'{path}' takes at most {most} elements, got {len(value)}.",
            path,
            "array_above_max_length",
        )
    return value
