"""A choice as a chat message, and its events as the deltas of a stream."""

from typing import Any

from rayfin.deployments.api.openai.replies import (
    CalledFunction,
    ChatDelta,
    ChatMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
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
        return ChatMessage(
            role=role,
            content=choice.content,
            tool_calls=calls or None,
            **self._thought(choice.reasoning or None),
        )

    def parts(self, delta: TextDelta) -> list[Event]:
        """Returns the events that are sent, each as a delta of the stream."""
        return [event for event in delta.events if self._is_sent(event)]

    def count(self, delta: TextDelta) -> int:
        return len(self.parts(delta))

    def delta(self, event: Event, choice: Choice) -> ChatDelta:
        if event.kind == "content":
            return ChatDelta(content=event.text)
        if event.kind == "reasoning":
            return ChatDelta(**self._thought(event.text))
        if event.kind == "arguments":
            piece = ToolCallDelta(index=event.index, function=FunctionDelta(arguments=event.text))
            return ChatDelta(tool_calls=[piece])
        call = ToolCallDelta(
            index=event.index,
            id=choice.calls[event.index].id,
            type="function",
            function=FunctionDelta(name=event.name, arguments=""),
        )
        return ChatDelta(tool_calls=[call])

    def _thought(self, text: str | None) -> dict[str, Any]:
        return dict.fromkeys(self._names, text)

    def _is_sent(self, event: Event) -> bool:
        if event.kind == "reasoning":
            return bool(event.text and self._names)
        return event.kind == "call" or bool(event.text)
