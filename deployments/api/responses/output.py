"""The output of a response while it grows: items in order, each of them piece by piece."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rayfin.deployments.api.responses.items import item_id
from rayfin.deployments.api.responses.replies import (
    CustomToolCallItem,
    FunctionCallItem,
    Item,
    ItemStatus,
    OutputMessage,
    OutputTextPart,
    ReasoningItem,
    ReasoningTextPart,
    Status,
    ToolSearchCallItem,
)
from rayfin.deployments.generation.logprobs import ChatTokenLogprob
from rayfin.deployments.guidance.tools import Tool, ToolKind
from rayfin.deployments.text.parsing.events import Event
from rayfin.deployments.text.parsing.json_text import read_object

OutputKind = Literal[
    "reasoning", "message", "function_call", "custom_tool_call", "tool_search_call"
]
PREFIXES: dict[OutputKind, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}
CALLS: dict[ToolKind, OutputKind] = {"custom": "custom_tool_call", "search": "tool_search_call"}


Piece = tuple[str, list[ChatTokenLogprob]]
"""What one event added to an item: text (of a call: of its arguments), and log probabilities."""


@dataclass(slots=True)
class OutputItem:
    """One item. It is closed before the next one opens, and then has at least one piece."""

    kind: OutputKind
    id: str
    call_id: str = ""  # of a call
    name: str = ""
    namespace: str = ""
    pieces: list[Piece] = field(default_factory=list)
    closed: bool = False
    ended: bool = False  # the call is whole; one that broke off is closed only

    @property
    def is_call(self) -> bool:
        return self.kind not in ("reasoning", "message")

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def logprobs(self) -> list[ChatTokenLogprob]:
        return [entry for _, logprobs in self.pieces for entry in logprobs]

    def copy(self) -> "OutputItem":
        return replace(self, pieces=self.pieces.copy())

    def close(self) -> None:
        if not self.pieces:
            self.pieces.append(("", []))  # each "done" event follows a "delta"
        self.closed = True

    def status(self, response: Status) -> ItemStatus:
        """Returns the item's status in a response that has the status ``response``."""
        if not self.closed and response in ("queued", "in_progress"):
            return "in_progress"
        if self.is_call:
            return "completed" if self.ended else "incomplete"
        return "completed" if self.closed or response == "completed" else "incomplete"

    def reply(self, status: ItemStatus) -> Item:
        """Returns the item as it stands."""
        if self.is_call:
            return self._call({"id": self.id, "status": status, "call_id": self.call_id})
        part = self.part()
        if isinstance(part, ReasoningTextPart):
            return ReasoningItem(id=self.id, status=status, content=[part])
        return OutputMessage(id=self.id, status=status, role="assistant", content=[part])

    def _call(self, fields: dict[str, Any]) -> Item:
        if self.kind == "tool_search_call":
            given = read_object(self.text) if self.ended else None
            return ToolSearchCallItem(**fields, arguments=given or {})
        fields |= {"name": self.name, "namespace": self.namespace or None}
        if self.kind == "custom_tool_call":
            return CustomToolCallItem(**fields, input=self.text)
        return FunctionCallItem(**fields, arguments=self.text)

    def part(self) -> OutputTextPart | ReasoningTextPart:
        """Returns the content of a message or of reasoning as it stands."""
        if self.kind == "reasoning":
            return ReasoningTextPart(text=self.text)
        return OutputTextPart(text=self.text, logprobs=self.logprobs)

    def opened(self) -> Item:
        """Returns the item as it was when it opened."""
        empty = replace(self, pieces=[], ended=False).reply("in_progress")
        if isinstance(empty, OutputMessage | ReasoningItem):
            empty.content = []
        return empty


@dataclass(slots=True)
class ResponseOutput:
    """The items of an output; only the last one may be open."""

    items: list[OutputItem] = field(default_factory=list)

    def copy(self) -> "ResponseOutput":
        return ResponseOutput([item.copy() for item in self.items])

    def append(
        self,
        events: Sequence[Event],
        logprobs: Sequence[ChatTokenLogprob] = (),
        call_ids: Sequence[str] = (),
        tools: Mapping[str, Tool] = {},
    ) -> None:
        """Adds the events of one delta.

        Args:
            logprobs: of all its tokens; the first text of the delta gets them, or the message that
                is open. A delta without either drops them.
            call_ids: of the calls so far, by their index.
            tools: by the names in events.
        """
        waiting = list(logprobs)
        for event in events:
            if event.kind == "call":
                self._open_call(call_ids[event.index], event.name, tools.get(event.name))
            elif event.kind == "call_end":
                self.items[-1].ended = True
                self.close()
            elif event.kind == "content" and (event.text or waiting):
                self._item("message").pieces.append((event.text, waiting))
                waiting = []
            elif event.kind == "reasoning" and event.text:
                self._item("reasoning").pieces.append((event.text, []))
            elif event.kind == "arguments" and event.text:
                self.items[-1].pieces.append((event.text, []))
        last = self.items[-1] if self.items else None
        if waiting and last is not None and last.kind == "message" and not last.closed:
            last.pieces.append(("", waiting))

    def complete(self) -> None:
        """Makes the output one that may end: it has an item, and the last one has a piece."""
        last = self.items[-1] if self.items else self._open("message")
        if not last.pieces:
            last.pieces.append(("", []))

    def close(self) -> None:
        """Closes the last item."""
        if self.items and not self.items[-1].closed:
            self.items[-1].close()

    def _item(self, kind: OutputKind) -> OutputItem:
        """Returns the open item of a kind; opens it if another one is the last."""
        last = self.items[-1] if self.items else None
        if last is None or last.closed or last.kind != kind:
            return self._open(kind)
        return last

    def _open_call(self, call_id: str, name: str, tool: Tool | None) -> None:
        opened = self._open(
            "function_call" if tool is None else CALLS.get(tool.kind, "function_call")
        )
        opened.call_id, opened.name = call_id, name
        if tool is not None and tool.called:
            opened.name, opened.namespace = tool.called, tool.namespace

    def _open(self, kind: OutputKind) -> OutputItem:
        self.close()
        self.items.append(OutputItem(kind, item_id(PREFIXES[kind])))
        return self.items[-1]
