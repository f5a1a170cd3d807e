"""Anthropic's messages and system prompt as the chat messages of a template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.anthropic.bodies import MAX_TOOL_NAME
from rayfin.deployments.text.checks import (
    TEXT_OR_PARTS,
    as_choice,
    as_list,
    as_name,
    as_object,
    as_string,
    required,
    wrong_type,
)
from rayfin.deployments.text.messages import MAX_MESSAGES, PlacedPart, text_of
from rayfin.deployments.text.repair import as_parts, merged

ROLES = ("user", "assistant", "system")
DOCUMENTS = ("document", "search_result")
BLOCKS = {  # role -> the types of its blocks
    "user": ("text", "tool_result", "image", *DOCUMENTS),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
RESULT_BLOCKS = ("text", "image", "tool_reference", *DOCUMENTS)  # of a tool's result
FAILED = "Error: "  # before the result of a tool that failed; templates have no place for it
BILLING = "x-anthropic-billing-header:"
"""Begins Claude Code's first line, which differs between sessions, so that no prefix would be
found again. No model needs it."""


@dataclass(slots=True)
class _Known:
    """What a block may refer to."""

    tools: Mapping[str, Any]  # functions by their names
    calls: set[str] = field(default_factory=set)  # ids of those so far


def chat_messages(
    messages: object,
    system: object,
    tools: Mapping[str, Any] | None = None,
    *,
    is_part: bool = False,
) -> list[dict[str, Any]]:
    """Returns ``system`` first; neighbours of one role are one message, as in Anthropic's API.

    The results of tools are messages of their own, before the text of their message. A final
    message of the assistant's is the start of the answer; an empty one is left out.

    Args:
        tools: in the form of a chat, by their names; a result may refer to them.
        is_part: the conversation goes on, so its calls may have no results.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong, such as messages[0].content[1].type.
    """
    chat: list[dict[str, Any]] = []
    known = _Known(tools or {})
    if system not in (None, []) and (text := _unbilled(_text(system, "system"))):
        chat.append({"role": "system", "content": text})
    listed = as_list(messages, "messages", MAX_MESSAGES)
    for i, written in enumerate(listed):
        path = f"messages[{i}]"
        message = as_object(written, path)
        role = as_choice(required(message, "role", path), ROLES, f"{path}.role")
        content = required(message, "content", path)
        chat += _messages(role, content, f"{path}.content", known)
    chat = merged(chat, lambda first, said: first["role"] == said["role"] != "tool")
    if not chat:
        raise InvalidRequest("'messages' must not be empty.", "messages", "empty_array")
    last = chat[-1]
    if _is_answer(last) and not is_part:
        if "tool_calls" in last:
            raise InvalidRequest(
                "A tool_use block must have its tool_result in the next message.",
                f"messages[{len(listed) - 1}].content",
            )
        if not text_of(last["content"]).strip():
            chat.pop()
    return chat


def is_continued(chat: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the final message is the start of the answer."""
    return bool(chat) and _is_answer(chat[-1])


def _is_answer(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "assistant")


def _messages(role: str, content: object, path: str, known: _Known) -> list[dict[str, Any]]:
    """Returns the chat messages of one message."""
    if content == []:  # Claude Code's compactions have such messages
        return [{"role": role, "content": ""}] if role == "assistant" else []
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    parts: dict[str, list[Any]] = {kind: [] for kind in BLOCKS[role]}
    ordered: list[Any] = []  # texts and images
    for i, written in enumerate(as_list(content, path, MAX_MESSAGES, TEXT_OR_PARTS)):
        where = f"{path}[{i}]"
        kind, part = _block(as_object(written, where), where, BLOCKS[role], known)
        parts[kind].append(part)
        if kind in ("text", "image"):
            ordered += as_parts(part) if kind == "text" else [part]
    results: list[dict[str, Any]] = parts.get("tool_result", [])
    if results and not ordered:
        return results
    said: dict[str, Any] = {"role": role, "content": "\n".join(parts["text"])}
    if parts.get("image"):
        said["content"] = ordered
    if parts.get("thinking"):
        said["reasoning_content"] = "\n".join(parts["thinking"])
    if parts.get("tool_use"):
        said["tool_calls"] = parts["tool_use"]
    return [*results, said]


def _block(
    block: Mapping[str, Any], path: str, allowed: Sequence[str], known: _Known
) -> tuple[str, Any]:
    """Returns a block's type, and what the chat gets for it."""
    kind = as_string(required(block, "type", path), f"{path}.type")
    if kind not in allowed:
        raise _misplaced(kind, path)
    if kind == "tool_use":
        return kind, _call(block, path, known)
    if kind == "tool_result":
        return kind, _result(block, path, known)
    if kind in DOCUMENTS:
        return "text", _document(kind, block, path)
    if kind == "tool_reference":
        name = as_string(required(block, "tool_name", path), f"{path}.tool_name")
        if name not in known.tools:
            raise InvalidRequest(
                f"A tool_reference names {name[:64]!r}, which is not in tools.",
                f"{path}.tool_name",
            )
        return "text", json.dumps(known.tools[name], ensure_ascii=False)
    if kind == "image":
        return kind, PlacedPart(block, path)
    if kind == "redacted_thinking":  # of another model: only that one can read it
        return kind, None
    return kind, as_string(required(block, kind, path), f"{path}.{kind}")


def _document(kind: str, block: Mapping[str, Any], path: str) -> str:
    """Returns a document of text, below its title and what is said of it."""
    source, where = block, path
    heading = [block.get(name) for name in ("title", "context")]
    if kind == "document":
        where = f"{path}.source"
        source = as_object(required(block, "source", path), where)
        if required(source, "type", where) == "text":
            said = as_string(required(source, "data", where), f"{where}.data")
            return "\n".join([line for line in heading if isinstance(line, str)] + [said])
        if source["type"] != "content":
            raise InvalidRequest(
                "This model does not support PDF input: it reads documents of text only.",
                f"{where}.type",
                "unsupported_content",
            )
    else:
        heading[1] = block.get("source")
    said = _text(required(source, "content", where), f"{where}.content")
    return "\n".join([line for line in heading if isinstance(line, str)] + [said])


def _call(block: Mapping[str, Any], path: str, known: _Known) -> dict[str, Any]:
    name = as_name(required(block, "name", path), f"{path}.name", MAX_TOOL_NAME)
    given = as_object(required(block, "input", path), f"{path}.input")
    call_id = as_string(required(block, "id", path), f"{path}.id")
    known.calls.add(call_id)
    return {
        "type": "function",
        "id": call_id,
        "function": {"name": name, "arguments": given},
    }


def _result(block: Mapping[str, Any], path: str, known: _Known) -> dict[str, Any]:
    call_id = as_string(required(block, "tool_use_id", path), f"{path}.tool_use_id")
    if call_id not in known.calls:
        raise InvalidRequest(
            f"A tool_result block must follow the tool_use block of its id, and {call_id[:64]!r} "
            "is not there.",
            f"{path}.tool_use_id",
        )
    content, failed = block.get("content"), block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise wrong_type("a boolean", failed, f"{path}.is_error")
    shown = "" if content in (None, []) else _shown(content, f"{path}.content", known)
    if failed:
        shown = FAILED + shown if isinstance(shown, str) else [*as_parts(FAILED.strip()), *shown]
    return {"role": "tool", "tool_call_id": call_id, "content": shown}


def _shown(content: object, path: str, known: _Known) -> str | list[Any]:
    """What a tool gave: its texts as one, or its parts in order if there are images."""
    if isinstance(content, str):
        return content
    parts: list[Any] = []
    for i, written in enumerate(as_list(content, path, MAX_MESSAGES, TEXT_OR_PARTS)):
        where = f"{path}[{i}]"
        kind, part = _block(as_object(written, where), where, RESULT_BLOCKS, known)
        parts += as_parts(part) if kind == "text" else [part]
    if any(isinstance(part, PlacedPart) for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _text(content: object, path: str) -> str:
    """A text, or text blocks, which are joined by newlines as everywhere in Rayfin."""
    if isinstance(content, str):
        return content
    texts = []
    for i, written in enumerate(as_list(content, path, MAX_MESSAGES, TEXT_OR_PARTS)):
        where = f"{path}[{i}]"
        texts.append(_block(as_object(written, where), where, BLOCKS["system"], _Known({}))[1])
    return "\n".join(texts)


def _unbilled(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _misplaced(kind: str, path: str) -> InvalidRequest:
    if any(kind in kinds for kinds in BLOCKS.values()):
        return InvalidRequest(f"A block of type {kind!r} does not belong here.", f"{path}.type")
    return InvalidRequest(
        f"Blocks of type {kind[:32]!r} are not supported, only text and images are.",
        f"{path}.type",
        "unsupported_content",
    )
