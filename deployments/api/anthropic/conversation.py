"""Anthropic's messages and system prompt as the chat messages of a template."""

from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.text.checks import (
    TEXT_OR_PARTS,
    as_choice,
    as_list,
    as_object,
    as_string,
    required,
)
from rayfin.deployments.text.messages import MAX_MESSAGES

ROLES = ("user", "assistant", "system")


def chat_messages(messages: object, system: object) -> list[dict[str, str]]:
    """Returns ``system`` first; neighbours of one role are one message, as in Anthropic's API.

    A final message of the assistant's is the start of the answer; an empty one is left out.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong, such as messages[0].content[1].type.
    """
    chat: list[dict[str, str]] = []
    if system is not None:
        chat.append({"role": "system", "content": _text(system, "system")})
    for i, written in enumerate(as_list(messages, "messages", MAX_MESSAGES)):
        path = f"messages[{i}]"
        message = as_object(written, path)
        role = as_choice(required(message, "role", path), ROLES, f"{path}.role")
        text = _text(required(message, "content", path), f"{path}.content")
        if chat and chat[-1]["role"] == role:
            chat[-1]["content"] += f"\n{text}"
        else:
            chat.append({"role": role, "content": text})
    if _is_answer(chat[-1]) and not chat[-1]["content"].strip():
        chat.pop()
    return chat


def is_continued(chat: list[dict[str, str]]) -> bool:
    """Whether the final message is the start of the answer."""
    return bool(chat) and _is_answer(chat[-1])


def _is_answer(message: dict[str, str]) -> bool:
    return message["role"] == "assistant"


def _text(content: Any, path: str) -> str:
    """A text, or text blocks, which are joined by newlines as everywhere in Rayfin."""
    if isinstance(content, str):
        return content
    texts = []
    for i, written in enumerate(as_list(content, path, MAX_MESSAGES, TEXT_OR_PARTS)):
        where = f"{path}[{i}]"
        block = as_object(written, where)
        kind = as_string(required(block, "type", where), f"{where}.type")
        if kind != "text":
            raise InvalidRequest(
                f"Blocks of type {kind[:32]!r} are not supported: this model reads text only.",
                f"{where}.type",
                "unsupported_content",
            )
        texts.append(as_string(required(block, "text", where), f"{where}.text"))
    return "\n".join(texts)
