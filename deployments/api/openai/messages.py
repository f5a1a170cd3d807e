"""A choice as a chat message, and its events as the deltas of a stream."""

from collections.abc import Sequence
from typing import Any

from rayfin.deployments.api.openai.chunks import dumped, quoted
from rayfin.deployments.api.openai.replies import CalledFunction, ChatMessage, ToolCall
from rayfin.deployments.generation.choice import Choice
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
        calls = [
            ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
            for call in choice.parsed.whole_calls
        ]
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
                function = {"name": event.name, "arguments": ""}
                call_id = choice.calls[event.index].id
                call = {"index": event.index, "id": call_id, "type": "function"}
                said.setdefault("tool_calls", []).append({**call, "function": function})
            elif event.kind == "arguments" and event.text:
                _add_arguments(said.setdefault("tool_calls", []), event)
            elif event.text:
                for name in self._names if event.kind == "reasoning" else ("content",):
                    said[name] = said.get(name, "") + event.text
        return dumped(said)


def _add_arguments(calls: list[dict[str, Any]], event: Event) -> None:
    """Adds a piece of arguments to the call that the same event begins, or as a piece alone."""
    if calls and calls[-1]["index"] == event.index:
        calls[-1]["function"]["arguments"] += event.text
    else:
        calls.append({"index": event.index, "function": {"arguments": event.text}})


def content_delta(text: str) -> str:
    return f'{{"content":{quoted(text)}}}'
