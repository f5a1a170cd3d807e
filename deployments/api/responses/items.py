"""Items of a conversation: as clients write them, as they are kept, as a template reads them."""

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.responses.replies import (
    CallItem,
    CallOutput,
    CustomToolCallItem,
    CustomToolCallOutput,
    FunctionCallItem,
    FunctionCallOutput,
    InputImage,
    InputText,
    Item,
    OutputMessage,
    OutputTextPart,
    ReasoningItem,
    ReasoningTextPart,
    SummaryText,
    ToolSearchCallItem,
    ToolSearchOutput,
)
from rayfin.deployments.guidance.tools import (
    MAX_FLAT_NAME,
    SEARCH,
    declared_tools,
    flat_name,
    flat_tools,
)
from rayfin.deployments.http.json_body import renamed_paths
from rayfin.deployments.text.checks import (
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
from rayfin.deployments.text.messages import INPUT, MAX_MESSAGES, PlacedPart

Part = InputText | InputImage | OutputTextPart | ReasoningTextPart

MAX_ID = 512  # characters; OpenAI's are shorter than 100
ROLES = ("system", "developer", "user", "assistant")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
RESULTS = {"input_text": "text", "output_text": "text", "text": "text"}
THOUGHTS = {"reasoning_text": "text"}
SUMMARIES = {"summary_text": "text"}


def item_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def input_items(value: object, path: str = "input") -> list[Item]:
    """The ``input`` of a request: a text of the user's, or items.

    Items of an earlier response's output may stand among them.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong, such as input[0].content[1].type.
    """
    if value is None:
        raise missing(path)
    if isinstance(value, str):
        if not value:
            raise InvalidRequest(f"'{path}' must not be empty.", path, "empty_prompt")
        return [OutputMessage(id=item_id("msg"), role="user", content=[InputText(text=value)])]
    if not isinstance(value, list):
        raise wrong_type("a string or a list of items", value, path)
    listed = as_list(value, path, MAX_MESSAGES)
    return [_item(item, f"{path}[{i}]") for i, item in enumerate(listed)]


def check_calls(history: Iterable[Item], items: Sequence[Item]) -> None:
    """Refuses an output in ``items`` without its call before it.

    Raises:
        InvalidRequest: ``param`` is the path of its ``call_id``.
    """
    called = {item.call_id for item in history if isinstance(item, CallItem)}
    for i, item in enumerate(items):
        if isinstance(item, CallItem):
            called.add(item.call_id)
        elif isinstance(item, CallOutput) and item.call_id not in called:
            kind = item.type.replace("_", " ")
            raise InvalidRequest(
                f"No tool call found for {kind} with call_id {item.call_id[:64]!r}.",
                f"input[{i}].call_id",
            )


def chat_messages(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as a chat template reads it, ``instructions`` before all else.

    Reasoning, the message after it and the calls after that are one message of the assistant's.
    """
    chat: list[dict[str, Any]] = []
    if instructions:
        chat.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None  # the assistant's message that may still get more
    for item in items:
        if isinstance(item, CallOutput):
            turn = None
            shown = _result(item)
            chat.append({"role": "tool", "tool_call_id": item.call_id, "content": shown})
        elif isinstance(item, OutputMessage) and item.role != "assistant":
            turn = None
            chat.append({"role": item.role, "content": _content(item)})
        elif not isinstance(item, ReasoningItem) or any(texts_of(item)):
            if turn is None or not _continues(turn, item):
                turn = {"role": "assistant", "content": ""}
                chat.append(turn)
            _add(turn, item)
    return chat


def texts_of(item: Item) -> list[str]:
    """Returns all texts of an item."""
    if isinstance(item, CallItem):
        return list(_function(item).values())
    if isinstance(item, ToolSearchOutput):
        return [_result(item)]
    if isinstance(item, FunctionCallOutput | CustomToolCallOutput):
        shown = item.output
        return [shown] if isinstance(shown, str) else _texts_in(shown)
    if isinstance(item, ReasoningItem) and not item.content:
        return [part.text for part in item.summary]
    return _texts_in(item.content)


def addresses_of(item: Item) -> list[str]:
    """Returns the addresses of an item's images, data: addresses with all of their bytes."""
    parts: Sequence[Part] = ()
    if isinstance(item, OutputMessage):
        parts = item.content
    elif isinstance(item, FunctionCallOutput | CustomToolCallOutput) and not isinstance(
        item.output, str
    ):
        parts = item.output
    return [part.image_url for part in parts if isinstance(part, InputImage)]


def _texts_in(parts: Sequence[Part]) -> list[str]:
    return [part.text for part in parts if not isinstance(part, InputImage)]


def _content(item: OutputMessage) -> str | list[dict[str, Any]]:
    """A message's texts as one, or its parts in order if it has images."""
    if not any(isinstance(part, InputImage) for part in item.content):
        return "\n".join(texts_of(item))
    return _parts(item.content)


def _parts(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Parts as a chat has them, in order."""
    return [
        PlacedPart(part.model_dump(), part.path)
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for part in parts
    ]


def _continues(turn: Mapping[str, Any], item: Item) -> bool:
    """Whether an item of the assistant's belongs to the message before it."""
    if isinstance(item, CallItem):
        return True
    if "tool_calls" in turn or turn["content"]:
        return False
    return isinstance(item, ReasoningItem | OutputMessage)


def _add(turn: dict[str, Any], item: Item) -> None:
    if isinstance(item, CallItem):
        call = {"type": "function", "id": item.call_id, "function": _function(item)}
        turn.setdefault("tool_calls", []).append(call)
        return
    text = "\n".join(texts_of(item))
    if isinstance(item, ReasoningItem):
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = text if before is None else f"{before}\n{text}"
    else:
        turn["content"] = text


def _function(item: CallItem) -> dict[str, str]:
    """Returns a call as one of a function of a chat."""
    match item:
        case FunctionCallItem():
            return {"name": flat_name(item.name, item.namespace), "arguments": item.arguments}
        case CustomToolCallItem():
            name, given = flat_name(item.name, item.namespace), {INPUT: item.input}
        case ToolSearchCallItem():
            name, given = SEARCH, item.arguments
    return {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}


def _result(item: CallOutput) -> Any:
    """Returns what a call gave, as a chat has it; of a search, the tools as templates read them."""
    if isinstance(item, ToolSearchOutput):
        tools = declared_tools(item.tools, flat_tools).shown or ()
        return json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    assert isinstance(item, FunctionCallOutput | CustomToolCallOutput)
    return item.output if isinstance(item.output, str) else _parts(item.output)


def _item(written: object, path: str) -> Item:
    item = as_object(written, path)
    kind = as_string(item.get("type") or "message", f"{path}.type")
    if kind not in _READERS:
        raise InvalidRequest(
            f"Items of type {kind[:32]!r} are not supported by this version of Rayfin, only "
            "messages, calls of tools, their outputs and reasoning are.",
            f"{path}.type",
            "unsupported_content",
        )
    return _READERS[kind](item, path)


def _function_call(item: Mapping[str, Any], path: str) -> FunctionCallItem:
    arguments = as_string(required(item, "arguments", path), f"{path}.arguments")
    return FunctionCallItem(id=_id(item, path, "fc"), arguments=arguments, **_called(item, path))


def _custom_call(item: Mapping[str, Any], path: str) -> CustomToolCallItem:
    text = as_string(required(item, "input", path), f"{path}.input")
    return CustomToolCallItem(id=_id(item, path, "ctc"), input=text, **_called(item, path))


def _search_call(item: Mapping[str, Any], path: str) -> ToolSearchCallItem:
    arguments = required(item, "arguments", path)
    if isinstance(arguments, str):
        arguments = {"query": arguments}
    call_id = _call_id(item, path)
    return ToolSearchCallItem(id=_id(item, path, "tsc"), call_id=call_id, arguments=arguments)


def _called(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns the call's id, and the name of its tool."""
    names = {"name": required(item, "name", path), "namespace": item.get("namespace") or None}
    for name, value in names.items():
        if value is not None:
            as_name(value, f"{path}.{name}", MAX_FLAT_NAME)
    return {"call_id": _call_id(item, path), **names}


def _function_output(item: Mapping[str, Any], path: str) -> FunctionCallOutput:
    output = _output(required(item, "output", path), f"{path}.output")
    call_id = _call_id(item, path)
    return FunctionCallOutput(id=_id(item, path, "fco"), call_id=call_id, output=output)


def _custom_output(item: Mapping[str, Any], path: str) -> CustomToolCallOutput:
    output = _output(required(item, "output", path), f"{path}.output")
    call_id = _call_id(item, path)
    return CustomToolCallOutput(id=_id(item, path, "ctco"), call_id=call_id, output=output)


def _search_output(item: Mapping[str, Any], path: str) -> ToolSearchOutput:
    """Returns the tools that a search has found, checked as those of a request."""
    tools = required(item, "tools", path)
    with renamed_paths("tools", f"{path}.tools"):
        declared_tools(tools, flat_tools)
    call_id = _call_id(item, path)
    return ToolSearchOutput(id=_id(item, path, "tso"), call_id=call_id, tools=tools)


def _output(written: object, path: str) -> str | list[InputText | InputImage]:
    """What a function gave: its texts as one, or its parts in order if it has images."""
    if written == []:
        return ""
    if not (isinstance(written, list) and any(map(_is_image, written))):
        return "\n".join(_texts(written, path, RESULTS))
    return _with_images(written, path, RESULTS)


def _with_images(
    written: list[Any], path: str, kinds: Mapping[str, str]
) -> list[InputText | InputImage]:
    """Parts, in order: images, and texts of these kinds."""
    parts: list[InputText | InputImage] = []
    for i, part in enumerate(as_list(written, path, MAX_MESSAGES, TEXT_OR_PARTS)):
        where = f"{path}[{i}]"
        if _is_image(part):
            parts.append(_image(part, where))
        else:
            parts.append(InputText(text=_part_text(part, where, kinds)))
    return parts


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "input_image"


def _message(item: Mapping[str, Any], path: str) -> OutputMessage:
    role: Any = as_choice(required(item, "role", path), ROLES, f"{path}.role")
    written = required(item, "content", path)
    content: list[InputText | InputImage | OutputTextPart] = []
    if role == "assistant":
        texts = _texts(written, f"{path}.content", TEXTS) if written != [] else []
        content += [OutputTextPart(text=text) for text in texts]
    elif isinstance(written, list):
        content += _with_images(written, f"{path}.content", TEXTS)
    else:
        content += [InputText(text=text) for text in _texts(written, f"{path}.content", TEXTS)]
    return OutputMessage(id=_id(item, path, "msg"), role=role, content=content)


def _reasoning(item: Mapping[str, Any], path: str) -> ReasoningItem:
    """Parts of the thought itself; other servers' may have a summary only, or nothing readable."""
    texts = {
        name: _texts(item[name], f"{path}.{name}", kinds) if item.get(name) else []
        for name, kinds in (("content", THOUGHTS), ("summary", SUMMARIES))
    }
    return ReasoningItem(
        id=_id(item, path, "rs"),
        summary=[SummaryText(text=text) for text in texts["summary"]],
        content=[ReasoningTextPart(text=text) for text in texts["content"]],
    )


def _id(item: Mapping[str, Any], path: str, prefix: str) -> str:
    given = item.get("id")
    return item_id(prefix) if given is None else _short(given, f"{path}.id")


def _short(given: object, path: str) -> str:
    """Returns an id, which the sizes of stores leave out."""
    text = as_string(given, path)
    if len(text) > MAX_ID:
        said = f"'{path}' may have at most {MAX_ID} characters, got {len(text)}."
        raise InvalidRequest(said, path, "string_above_max_length")
    return text


def _call_id(item: Mapping[str, Any], path: str) -> str:
    call_id = _short(required(item, "call_id", path), f"{path}.call_id")
    if not call_id:
        raise InvalidRequest(f"'{path}.call_id' must not be empty.", f"{path}.call_id")
    return call_id


def _texts(content: object, path: str, kinds: Mapping[str, str]) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for i, part in enumerate(as_list(content, path, MAX_MESSAGES, TEXT_OR_PARTS)):
        texts.append(_part_text(part, f"{path}[{i}]", kinds))
    return texts


def _part_text(part: object, where: str, kinds: Mapping[str, str]) -> str:
    part = as_object(part, where)
    kind = as_string(required(part, "type", where), f"{where}.type")
    if kind not in kinds:
        raise InvalidRequest(
            f"Content of type {kind[:32]!r} is not supported, only text and images are.",
            f"{where}.type",
            "unsupported_content",
        )
    field = kinds[kind]
    return as_string(required(part, field, where), f"{where}.{field}")


def _image(part: Mapping[str, Any], where: str) -> InputImage:
    """An image as it is kept; ``MediaReader`` checks the address itself."""
    if part.get("file_id") is not None:
        raise InvalidRequest(
            "Images by file_id are not supported; send image_url.",
            f"{where}.file_id",
            "unsupported_content",
        )
    url = as_string(required(part, "image_url", where), f"{where}.image_url")
    return InputImage.at(where, url, str(part.get("detail") or "auto")[:16])


_READERS: dict[str, Callable[[Mapping[str, Any], str], Item]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _function_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _custom_output,
    "tool_search_call": _search_call,
    "tool_search_output": _search_output,
}
