"""A choice as a chat message, and its events as the deltas of a stream."""

from typing import Any

from rayfin.deployments.api.openai.chunks import dumped, quoted
from rayfin.deployments.api.openai.replies import CalledFunction, ChatMessage, ToolCall
from rayfin.deployments.generation.choice import Choice
from rayfin.deployments.text.output import TextDelta
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

    def parts(self, delta: TextDelta) -> list[Event]:
        """Returns the events that are sent, each as a delta of the stream."""
        return [event for event in delta.events if self._is_sent(event)]

    def count(self, delta: TextDelta) -> int:
        return len(self.parts(delta))

    def delta(self, event: Event, choice: Choice) -> str:
        """Returns the JSON text of one kind of part: reasoning, content, or a piece of one call.

        The first delta of a call has its name; the others have pieces of the arguments.
        """
        if event.kind == "content":
            return content_delta(event.text)
        if event.kind == "reasoning":
            text = quoted(event.text)
            return "{" + ",".join(f'"{name}":{text}' for name in self._names) + "}"
        call: dict[str, Any] = {"index": event.index, "function": {"arguments": event.text}}
        if event.kind == "call":
            function = {"name": event.name, "arguments": ""}
            call_id = choice.calls[event.index].id
            call = {"index": event.index, "id": call_id, "type": "function", "function": function}
        return dumped({"tool_calls": [call]})

    def _is_sent(self, event: Event) -> bool:
        if event.kind == "reasoning":
            return bool(event.text and self._names)
        return event.kind == "call" or bool(event.text)


def content_delta(text: str) -> str:
    return f'{{"content":{quoted(text)}}}'
