"""Anthropic's messages and system prompt as the chat messages of a template."""

from collections.abc import Mapping, Sequence
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

ROLES = ("user", "assistant", "system")
BLOCKS = {  # role -> the types of its blocks
    "user": ("text", "tool_result", "image"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
RESULT_BLOCKS = ("text", "image")  # of a tool's result
FAILED = "Error: "  # before the result of a tool that failed; templates have no place for it


def chat_messages(messages: object, system: object) -> list[dict[str, Any]]:
    """Returns ``system`` first; neighbours of one role are one message, as in Anthropic's API.

    The results of tools are messages of their own, before the text of their message. A final
    message of the assistant's is the start of the answer; an empty one is left out.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong, such as messages[0].content[1].type.
    """
    chat: list[dict[str, Any]] = []
    called: set[str] = set()  # ids of the calls so far
    if system not in (None, []) and (text := _text(system, "system")):
        chat.append({"role": "system", "content": text})
    listed = as_list(messages, "messages", MAX_MESSAGES)
    for i, written in enumerate(listed):
        path = f"messages[{i}]"
        message = as_object(written, path)
        role = as_choice(required(message, "role", path), ROLES, f"{path}.role")
        content = required(message, "content", path)
        for said in _messages(role, content, f"{path}.content", called):
            _append(chat, said)
    last = chat[-1]
    if _is_answer(last):
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


def _append(chat: list[dict[str, Any]], said: dict[str, Any]) -> None:
    """Adds a message, or its parts to the one before if that has the same role."""
    last = chat[-1] if chat else None
    if last is None or last["role"] != said["role"] or said["role"] == "tool":
        chat.append(said)
        return
    for name in ("reasoning_content", "content"):
        texts = [own[name] for own in (last, said) if own.get(name)]
        if any(isinstance(text, list) for text in texts):
            last[name] = [part for text in texts for part in _parts(text)]
        elif texts:
            last[name] = "\n".join(texts)
    if "tool_calls" in said:
        last.setdefault("tool_calls", []).extend(said["tool_calls"])


def _messages(role: str, content: object, path: str, called: set[str]) -> list[dict[str, Any]]:
    """Returns the chat messages of one message."""
    if role == "assistant" and content == []:
        content = ""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    parts: dict[str, list[Any]] = {kind: [] for kind in BLOCKS[role]}
    ordered: list[Any] = []  # texts and images
    for i, written in enumerate(as_list(content, path, MAX_MESSAGES, TEXT_OR_PARTS)):
        where = f"{path}[{i}]"
        kind, part = _block(as_object(written, where), where, BLOCKS[role], called)
        parts[kind].append(part)
        if kind in ("text", "image"):
            ordered += _parts(part) if kind == "text" else [part]
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
    block: Mapping[str, Any], path: str, allowed: Sequence[str], called: set[str]
) -> tuple[str, Any]:
    """Returns a block's type, and what the chat gets for it."""
    kind = as_string(required(block, "type", path), f"{path}.type")
    if kind not in allowed:
        raise _misplaced(kind, path)
    if kind == "tool_use":
        return kind, _call(block, path, called)
    if kind == "tool_result":
        return kind, _result(block, path, called)
    if kind == "image":
        return kind, PlacedPart(block, path)
    if kind == "redacted_thinking":  # of another model: only that one can read it
        return kind, None
    return kind, as_string(required(block, kind, path), f"{path}.{kind}")


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _call(block: Mapping[str, Any], path: str, called: set[str]) -> dict[str, Any]:
    name = as_name(required(block, "name", path), f"{path}.name", MAX_TOOL_NAME)
    given = as_object(required(block, "input", path), f"{path}.input")
    call_id = as_string(required(block, "id", path), f"{path}.id")
    called.add(call_id)
    return {
        "type": "function",
        "id": call_id,
        "function": {"name": name, "arguments": given},
    }


def _result(block: Mapping[str, Any], path: str, called: set[str]) -> dict[str, Any]:
    call_id = as_string(required(block, "tool_use_id", path), f"{path}.tool_use_id")
    if call_id not in called:
        raise InvalidRequest(
            f"A tool_result block must follow the tool_use block of its id, and {call_id[:64]!r} "
            "is not there.",
            f"{path}.tool_use_id",
        )
    content, failed = block.get("content"), block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise wrong_type("a boolean", failed, f"{path}.is_error")
    shown = "" if content in (None, []) else _shown(content, f"{path}.content")
    if failed:
        shown = FAILED + shown if isinstance(shown, str) else [*_parts(FAILED.strip()), *shown]
    return {"role": "tool", "tool_call_id": call_id, "content": shown}


def _shown(content: object, path: str) -> str | list[Any]:
    """What a tool gave: its texts as one, or its parts in order if there are images."""
    if isinstance(content, str):
        return content
    parts: list[Any] = []
    for i, written in enumerate(as_list(content, path, MAX_MESSAGES, TEXT_OR_PARTS)):
        where = f"{path}[{i}]"
        kind, part = _block(as_object(written, where), where, RESULT_BLOCKS, set())
        parts += _parts(part) if kind == "text" else [part]
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
        texts.append(_block(as_object(written, where), where, BLOCKS["system"], set())[1])
    return "\n".join(texts)


def _misplaced(kind: str, path: str) -> InvalidRequest:
    if any(kind in kinds for kinds in BLOCKS.values()):
        return InvalidRequest(f"A block of type {kind!r} does not belong here.", f"{path}.type")
    return InvalidRequest(
        f"Blocks of type {kind[:32]!r} are not supported, only text and images are.",
        f"{path}.type",
        "unsupported_content",
    )
