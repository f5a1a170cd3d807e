"""Validates OpenAI's chat messages and tools, and simplifies them for a chat template."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.kinds import MediaKind
from rayfin.deployments.text.call_ids import restyle_ids
from rayfin.deployments.text.checks import (
    MAX_NAME,
    TEXT_OR_PARTS,
    as_choice,
    as_list,
    as_name,
    as_object,
    as_string,
    missing,
    required,
    wrong_type,
)
from rayfin.deployments.text.parsing.format import IdStyle

ContentFormat = Literal["string", "openai", "given"]
"""Content as templates get it: text, a list of parts, or in the form that it was sent in."""

MAX_MESSAGES = 8192  # and parts of one: an agent has thousands, which take 0.2 s to read
MAX_TOOLS = 128  # tools of a request, and tool calls of a message
MEDIA_TYPES: dict[str, MediaKind] = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_pil"), "image"),
    **dict.fromkeys(("input_audio", "audio_url"), "audio"),
}
"""Types of parts that are images, or clips of audio."""

NO_IMAGE = {"type": "text", "text": "[An image was here, which this model cannot read.]"}

PLACES: dict[MediaKind, dict[str, str]] = {
    "image": {"type": "image"},
    "audio": {"type": "audio", "audio": ""},  # older templates look for this key
}
"""What templates get for an image or a clip."""

READS: dict[MediaKind | None, str] = {
    None: "text",
    "image": "text and images",
    "audio": "text and audio",
}

SPEAKER = re.compile(r"[^\s<|\\/>]{1,64}")
"""The name of a message's author, as at OpenAI: letters of every script."""

MAX_CALL_NAME = 258
"""Characters in the name of an earlier call: a namespace's and a tool's of Responses."""

INPUT = "input"
"""The parameter of a custom tool as a function: its whole text."""

SILENT = ("assistant", "tool")
"""Roles whose messages may have no content: there are calls only, or a tool gave nothing."""

EXTRAS = ("name", "tool_call_id", "reasoning_content", "reasoning")  # passed on if present; strings


class PlacedPart(dict[str, Any]):
    """A part that the adapter of another API has moved, with its path as the client sent it."""

    def __init__(self, part: Mapping[str, Any], path: str) -> None:
        super().__init__(part)
        self.path = path


def plain_messages(
    messages: object,
    *,
    arguments_as_text: bool = False,
    id_style: IdStyle = "openai",
    content: ContentFormat = "string",
    media: MediaKind | None = None,
) -> list[dict[str, Any]]:
    """Returns messages with strings as content; text parts are joined by newlines, as in vLLM.

    The arguments of earlier tool calls become objects, since templates print them as JSON;
    other arguments stay text. What an assistant thought has both of its names.

    Args:
        arguments_as_text: the template wants arguments as JSON text.
        id_style: of the ids that the template can print. Others are replaced.
        content: "openai" gives parts in place of strings, "given" keeps the parts of those that
            have some. A message with images or clips always has parts.
        media: what the model reads beside text, which ``MediaReader`` has checked; others are
            refused.

    Raises:
        InvalidRequest: ``param`` is the path of the invalid value, such as messages[0].role.
    """
    listed = as_list(messages, "messages", MAX_MESSAGES)
    plain = [
        _message(message, f"messages[{i}]", arguments_as_text, media)
        for i, message in enumerate(listed)
    ]
    for sent, message in zip(listed, plain, strict=True):
        in_parts = isinstance(sent.get("content"), list) and bool(sent["content"])
        shown = in_parts and any(media_of(part) is not None for part in sent["content"])
        if shown or content == "openai" or (content == "given" and in_parts):
            message["content"] = _parts(sent["content"] if in_parts else message["content"])
    if id_style != "openai":
        restyle_ids(plain, id_style)
    return plain


class PlainTools(list[dict[str, Any]]):
    """Checked tools, which no one changes: what is found out of their texts is kept."""

    def __init__(self, tools: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(tools)
        texts = list(texts_in([*self]))
        self._values = "\0".join(text for text, is_key in texts if not is_key)
        self._keys = "\0".join(text for text, is_key in texts if is_key)
        self._found: dict[re.Pattern[str], tuple[bool, bool]] = {}

    @property
    def characters(self) -> int:
        """Of all of their texts."""
        return len(self._values) + len(self._keys)

    def find(self, pattern: re.Pattern[str]) -> tuple[bool, bool]:
        """Returns whether a value matches somewhere, and whether a key does.

        Args:
            pattern: of a tokenizer, which lives as long; it matches no NUL.
        """
        if pattern not in self._found:
            values, keys = pattern.search(self._values), pattern.search(self._keys)
            self._found[pattern] = (values is not None, keys is not None)
        return self._found[pattern]


def plain_tools(
    tools: object, longest: int = MAX_NAME, paths: Sequence[str] | None = None
) -> PlainTools:
    """Returns the function tools of a request; those that it has returned are not checked again.

    Args:
        longest: characters in a name.
        paths: of the tools, for errors; None: tools[0] and so on.

    Raises:
        InvalidRequest: ``param`` is the path of the invalid value, such as tools[0].function.name.
    """
    if isinstance(tools, PlainTools):
        return tools
    listed = as_list(tools, "tools", MAX_TOOLS)
    names: set[str] = set()
    for i, tool in enumerate(listed):
        path = f"tools[{i}]" if paths is None else paths[i]
        as_choice(required(as_object(tool, path), "type", path), ("function",), f"{path}.type")
        function = as_object(required(tool, "function", path), f"{path}.function")
        where = f"{path}.function.name"
        name = as_name(required(function, "name", f"{path}.function"), where, longest)
        if name in names:
            raise InvalidRequest(f"Two tools have the name {name!r}.", where)
        names.add(name)
        if function.get("description") is not None:
            as_string(function["description"], f"{path}.function.description")
        if function.get("parameters") is not None:
            as_object(function["parameters"], f"{path}.function.parameters")
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise wrong_type("a boolean", strict, f"{path}.function.strict")
    return PlainTools(dict(tool) for tool in listed)


def texts_in(value: object) -> Iterator[tuple[str, bool]]:
    """Yields every string inside ``value``, and whether it is the key of an object."""
    if isinstance(value, str):
        yield value, False
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), True
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def media_of(part: object) -> MediaKind | None:
    """What a part of a message is beside text, if it is an image or a clip of audio."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return MEDIA_TYPES.get(kind) if isinstance(kind, str) else None


def without_images(messages: object) -> object:
    """Returns unchecked messages with a line of text in the place of each image."""
    if isinstance(messages, list):
        return [without_images(message) for message in messages]
    if not isinstance(messages, Mapping) or not isinstance(messages.get("content"), list):
        return messages
    parts = [NO_IMAGE if media_of(part) == "image" else part for part in messages["content"]]
    return {**messages, "content": parts}


def is_part(value: object, kind: str) -> bool:
    """Returns whether a value is a message's part of that ``type``."""
    return isinstance(value, Mapping) and value.get("type") == kind


def has_parts(messages: object, kind: str) -> bool:
    """Returns whether unchecked messages have parts of that ``type``."""
    if not isinstance(messages, list | tuple):
        return False
    contents = (one.get("content") for one in messages if isinstance(one, Mapping))
    several = (content for content in contents if isinstance(content, list | tuple))
    return any(is_part(part, kind) for content in several for part in content)


def has_named_media(messages: object) -> bool:
    """Whether an image or clip in unchecked messages has vLLM's ``uuid``."""
    if isinstance(messages, list):
        return any(map(has_named_media, messages))
    if not isinstance(messages, Mapping):
        return False
    named = media_of(messages) is not None and messages.get("uuid") is not None
    return named or has_named_media(messages.get("content"))


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a plain message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def count_calls(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of tool calls in checked messages."""
    assistants = (message for message in messages if message["role"] == "assistant")
    return sum(len(message.get("tool_calls") or ()) for message in assistants)


def _message(message: object, path: str, as_text: bool, media: MediaKind | None) -> dict[str, Any]:
    message = as_object(message, path)
    role = as_name(required(message, "role", path), f"{path}.role")  # the template knows which
    calls = message.get("tool_calls")
    plain: dict[str, Any] = {"role": role}
    content = message.get("content")
    if role in SILENT and content in (None, []):
        plain["content"] = ""
    elif content is not None:
        plain["content"] = _content(content, f"{path}.content", media)
    else:
        raise missing(f"{path}.content")
    for name in EXTRAS:
        if message.get(name) is not None:
            plain[name] = as_string(message[name], f"{path}.{name}")
    if plain.get("name") == "":
        del plain["name"]
    if "name" in plain and not SPEAKER.fullmatch(plain["name"]):
        raise InvalidRequest(
            f"'{path}.name' may hold 1 to 64 characters without blanks and < | \\ / >.",
            f"{path}.name",
        )
    if role == "tool":
        required(plain, "tool_call_id", path)
    if calls and role == "assistant":
        listed = as_list(calls, f"{path}.tool_calls", MAX_TOOLS)
        plain["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{i}]", as_text) for i, call in enumerate(listed)
        ]
    thought = plain.get("reasoning_content") or plain.get("reasoning")
    if thought is not None and role == "assistant":
        plain["reasoning_content"] = plain["reasoning"] = thought
    return plain


def _content(content: object, path: str, media: MediaKind | None) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(as_list(content, path, MAX_MESSAGES, TEXT_OR_PARTS)):
        where = part.path if isinstance(part, PlacedPart) else f"{path}[{i}]"
        if media is not None and media_of(part) == media:
            continue
        kind = as_string(required(as_object(part, where), "type", where), f"{where}.type")
        field = {"text": "text", "input_text": "text", "refusal": "refusal"}.get(kind)
        if field is None:
            # By these words Claude Code drops a picture from its history, and goes on.
            known = "Could not process image. " if media_of(part) == "image" else ""
            raise InvalidRequest(
                f"{known}Content of type {kind[:32]!r} is not supported: this model reads "
                f"{READS[media]} only.",
                f"{where}.type",
                "unsupported_content",
            )
        texts.append(as_string(required(part, field, where), f"{where}.{field}"))
    return "\n".join(texts)


def _parts(content: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A checked content as parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    plain = []
    for part in content:
        field = "refusal" if part["type"] == "refusal" else "text"
        kind = media_of(part)
        plain.append(dict(PLACES[kind]) if kind else {"type": "text", "text": part[field]})
    return plain


def _tool_call(call: object, path: str, as_text: bool) -> dict[str, Any]:
    call = as_object(call, path)
    if call.get("type") is not None:
        as_choice(call["type"], ("function", "custom"), f"{path}.type")
    if call.get("type") == "custom":
        call = _function_call(call, path)
    function = as_object(required(call, "function", path), f"{path}.function")
    where = f"{path}.function.name"
    name = as_name(required(function, "name", f"{path}.function"), where, MAX_CALL_NAME)
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
        raise wrong_type("a string", written, f"{path}.function.arguments")
    if as_text and not isinstance(arguments, str):
        text = written if isinstance(written, str) and written else None
        arguments = text or json.dumps(arguments, ensure_ascii=False)
    plain = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        plain["id"] = as_string(call["id"], f"{path}.id")
    return plain


def _function_call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns the call of a custom tool as one of a function."""
    custom = as_object(required(call, "custom", path), f"{path}.custom")
    name = required(custom, "name", f"{path}.custom")
    text = as_string(custom.get(INPUT), f"{path}.custom.{INPUT}")
    return {"id": call.get("id"), "function": {"name": name, "arguments": {INPUT: text}}}
