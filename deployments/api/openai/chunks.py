"""Chunks of a stream as JSON text, in the shapes that vLLM sends, and the messages of choices.

A stream has a chunk for each step of each choice. So no object is made for a chunk: what all chunks
share is written once, and null keys are part of a literal. Only log probabilities are models.
"""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from pydantic import BaseModel

from rayfin.deployments.api.openai.replies import (
    CalledCustom,
    CalledFunction,
    ChatMessage,
    CustomToolCall,
    ToolCall,
)
from rayfin.deployments.generation.choice import AnswerCall, Choice
from rayfin.deployments.generation.usage import RequestMetrics, Usage
from rayfin.deployments.text.parsing.events import Event
from rayfin.deployments.text.parsing.format import ReasoningField

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
EMPTY = "{}"  # the delta of tokens that are no text yet, or whose text is left out


class ChunkFrame:
    """What all chunks of one stream have in common.

    Args:
        kind: the chunks' ``object``.
        created: seconds since 1970.
    """

    def __init__(self, answer_id: str, kind: str, created: int, model: str) -> None:
        fields = {"id": answer_id, "object": kind, "created": created, "model": model}
        self._head = f'{dumped(fields)[:-1]},"choices":['

    def chunk(self, choice: str, usage: str = "", more: str = "") -> str:
        """Returns a chunk of one choice; ``usage`` and ``more`` are further members or empty."""
        return f"{self._head}{choice}]{usage}{more}}}"

    def last(self, usage: Usage, metrics: RequestMetrics | None) -> str:
        """Returns the chunk without choices at the end of a stream."""
        more = "" if metrics is None else f',"metrics":{metrics.model_dump_json(exclude_none=True)}'
        return f'{self._head}],"usage":{usage.model_dump_json(exclude_none=True)}{more}}}'


def chat_choice(index: int, delta: str) -> str:
    """Returns a choice that has a delta and nothing else."""
    return f'{{"index":{index},"delta":{delta},{NO_MORE}'


NO_MORE = '"logprobs":null,"finish_reason":null,"token_ids":null}'


def full_chat_choice(
    index: int,
    delta: str,
    logprobs: BaseModel | None,
    token_ids: Sequence[int] | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
) -> str:
    end = f',"stop_reason":{dumped(stop_reason)}' if finish_reason else ""
    return (
        f'{{"index":{index},"delta":{delta},"logprobs":{_model(logprobs)},'
        f'"finish_reason":{dumped(finish_reason)}{end},"token_ids":{dumped(token_ids)}}}'
    )


def text_choice(
    index: int,
    text: str,
    logprobs: BaseModel | None,
    prompt_token_ids: Sequence[int] | None,
    token_ids: Sequence[int] | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
) -> str:
    """Returns a choice of a completion."""
    rich = not (logprobs is None and token_ids is None and prompt_token_ids is None)
    if finish_reason is None and not rich:
        return f'{{"index":{index},"text":{quoted(text)},{NO_MORE_TEXT}'
    return (
        f'{{"index":{index},"text":{quoted(text)},"logprobs":{_model(logprobs)},'
        f'"finish_reason":{dumped(finish_reason)},"stop_reason":{dumped(stop_reason)},'
        f'"prompt_token_ids":{dumped(prompt_token_ids)},"token_ids":{dumped(token_ids)}}}'
    )


NO_MORE_TEXT = (
    '"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
    '"token_ids":null}'
)


def usage_so_far(prompt: int, sent: int, details: str = "") -> str:
    """Returns the member ``usage`` of a chunk: its choice's tokens up to it."""
    return (
        f',"usage":{{"prompt_tokens":{prompt},"total_tokens":{prompt + sent},'
        f'"completion_tokens":{sent}{details}}}'
    )


def member(name: str, value: Any) -> str:
    """Returns a member that follows others."""
    return f',"{name}":{dumped(value)}'


def quoted(text: str) -> str:
    return encode_basestring(text)


def dumped(value: Any) -> str:
    return ENCODER.encode(value)


def _model(value: BaseModel | None) -> str:
    return "null" if value is None else value.model_dump_json()


FIELDS: dict[ReasoningField, tuple[str, ...]] = {
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
    "both": ("reasoning", "reasoning_content"),
}


class MessageWriter:
    """Writes the parts of choices.

    Args:
        field: the name of reasoning in replies.
        hidden: reasoning is left out (``include_reasoning: false``).
    """

    def __init__(self, field: ReasoningField, hidden: bool) -> None:
        self._names = () if hidden else FIELDS[field]

    def message(self, choice: Choice, role: str) -> ChatMessage:
        """Returns the whole message; a call that was cut is not in it."""
        calls = [_call(choice, call) for call in choice.parsed.whole_calls]
        thought = dict.fromkeys(self._names, choice.reasoning or None)
        return ChatMessage(role=role, content=choice.content, tool_calls=calls or None, **thought)

    def delta(self, events: Sequence[Event], choice: Choice) -> str:
        """Returns the JSON text of events: reasoning, content, pieces of calls; ``EMPTY`` if none.

        The first piece of a call has its name; the others have pieces of the arguments.
        """
        if len(events) == 1 and events[0].kind == "content":
            return content_delta(events[0].text)
        said: dict[str, Any] = {}
        for event in events:
            if event.kind == "call":
                begun = _call(choice, choice.calls[event.index], "").model_dump()
                said.setdefault("tool_calls", []).append({"index": event.index, **begun})
            elif event.kind == "arguments" and event.text:
                is_custom = _is_custom(choice, choice.calls[event.index])
                _add_arguments(said.setdefault("tool_calls", []), event, is_custom)
            elif event.text:
                for name in self._names if event.kind == "reasoning" else ("content",):
                    said[name] = said.get(name, "") + event.text
        return dumped(said)


def _is_custom(choice: Choice, call: AnswerCall) -> bool:
    tool = choice.parsed.plan.tools.get(call.name)
    return tool is not None and tool.kind == "custom"


def _call(
    choice: Choice, call: AnswerCall, arguments: str | None = None
) -> ToolCall | CustomToolCall:
    """Returns a call with these arguments; None: its own."""
    given = call.arguments if arguments is None else arguments
    if _is_custom(choice, call):
        return CustomToolCall(id=call.id, custom=CalledCustom(name=call.name, input=given))
    return ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=given))


def _add_arguments(calls: list[dict[str, Any]], event: Event, is_custom: bool) -> None:
    """Adds a piece of arguments to the call that the same event begins, or as a piece alone."""
    kind, member = ("custom", "input") if is_custom else ("function", "arguments")
    if calls and calls[-1]["index"] == event.index:
        calls[-1][kind][member] += event.text
    else:
        calls.append({"index": event.index, kind: {member: event.text}})


def content_delta(text: str) -> str:
    return f'{{"content":{quoted(text)}}}'
