"""Items of a conversation: as clients write them, as they are kept, as a template reads them."""

import uuid
from collections.abc import Iterable
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.responses.replies import InputText, OutputMessage, OutputTextPart
from rayfin.deployments.text.checks import (
    TEXT_OR_PARTS,
    as_choice,
    as_list,
    as_object,
    as_string,
    missing,
    required,
    wrong_type,
)
from rayfin.deployments.text.messages import MAX_MESSAGES

ROLES = ("system", "developer", "user", "assistant")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def message_id() -> str:
    return f"msg_{uuid.uuid4().hex}"


def input_items(value: object) -> list[OutputMessage]:
    """The ``input`` of a request: a text of the user's, or message items.

    Items of an earlier response's output may stand among them.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong, such as input[0].content[1].type.
    """
    if value is None:
        raise missing("input")
    if isinstance(value, str):
        if not value:
            raise InvalidRequest("'input' must not be empty.", "input", "empty_prompt")
        return [OutputMessage(id=message_id(), role="user", content=[InputText(text=value)])]
    if not isinstance(value, list):
        raise wrong_type("a string or a list of items", value, "input")
    listed = as_list(value, "input", MAX_MESSAGES)
    return [_item(item, f"input[{i}]") for i, item in enumerate(listed)]


def chat_messages(items: Iterable[OutputMessage], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as a chat template reads it, ``instructions`` before all else."""
    first = [] if instructions is None else [{"role": "system", "content": instructions}]
    return first + [
        {"role": item.role, "content": "\n".join(part.text for part in item.content)}
        for item in items
    ]


def _item(item: object, path: str) -> OutputMessage:
    item = as_object(item, path)
    kind = as_string(item.get("type") or "message", f"{path}.type")
    if kind != "message":
        raise InvalidRequest(
            f"Items of type {kind[:32]!r} are not supported by this version of Rayfin, only "
            "messages are.",
            f"{path}.type",
            "unsupported_content",
        )
    role: Any = as_choice(required(item, "role", path), ROLES, f"{path}.role")
    texts = _texts(required(item, "content", path), f"{path}.content")
    given = item.get("id")
    content: list[InputText | OutputTextPart]
    if role == "assistant":
        content = [OutputTextPart(text=text) for text in texts]
    else:
        content = [InputText(text=text) for text in texts]
    item_id = as_string(given, f"{path}.id") if given is not None else message_id()
    return OutputMessage(id=item_id, role=role, content=content)


def _texts(content: object, path: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for i, part in enumerate(as_list(content, path, MAX_MESSAGES, TEXT_OR_PARTS)):
        where = f"{path}[{i}]"
        kind = as_string(required(as_object(part, where), "type", where), f"{where}.type")
        if kind not in TEXTS:
            raise InvalidRequest(
                f"Content of type {kind[:32]!r} is not supported: this model reads text only.",
                f"{where}.type",
                "unsupported_content",
            )
        field = TEXTS[kind]
        texts.append(as_string(required(part, field, where), f"{where}.{field}"))
    return texts
