"""A choice as a chat message, and its events as the deltas of a stream."""

from collections.abc import Sequence
from typing import Any

from rayfin.deployments.api.openai.chunks import dumped, quoted
from rayfin.deployments.api.openai.replies import (
    CalledCustom,
    CalledFunction,
    ChatMessage,
    CustomToolCall,
    ToolCall,
)
from rayfin.deployments.generation.choice import AnswerCall, Choice
from rayfin.deployments.text.parsing.events import Event
from rayfin.deployments.text.parsing.format import ReasoningField

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
