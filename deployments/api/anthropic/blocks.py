"""The content blocks of a message as its events arrive: the stream's events, and the whole."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayfin.deployments.api.anthropic.replies import (
    AnthropicTextDelta,
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    InputDelta,
    SignatureDelta,
    TextBlock,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from rayfin.deployments.text.parsing.events import Event
from rayfin.deployments.text.parsing.json_text import read_object

BlockEvent = BlockStart | BlockDelta | BlockStop


@dataclass(slots=True)
class _Block:
    start: ContentBlock  # without its pieces
    pieces: list[str] = field(default_factory=list)
    stopped: bool = False
    ended: bool = False  # the call is whole; one that broke off is stopped only

    @property
    def whole(self) -> str:
        return "".join(self.pieces)


class ReplyBlocks:
    """The blocks of one message, in order; a block opens with its first text, a call at once.

    Args:
        shows_thinking: False leaves thinking out.
    """

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._blocks: list[_Block] = []

    def push(self, events: Sequence[Event], call_ids: Sequence[str]) -> list[BlockEvent]:
        """Adds the events of one delta.

        Args:
            call_ids: of the calls so far, by their index.
        """
        written: list[BlockEvent] = []
        for event in events:
            if event.kind == "call":
                block = ToolUseBlock(id=call_ids[event.index], name=event.name, input={})
                written += self._open(block)
            elif event.kind == "call_end":
                self._blocks[-1].ended = True
                written += self.stop()
            elif event.text and (event.kind != "reasoning" or self._shows_thinking):
                written += self._add(event)
        return written

    def stop(self) -> list[BlockEvent]:
        """Stops the last block."""
        if not self._blocks or self._blocks[-1].stopped:
            return []
        index, block = len(self._blocks) - 1, self._blocks[-1]
        block.stopped = True
        stop = BlockStop(index=index)
        if block.start.type != "thinking":
            return [stop]
        signature = SignatureDelta(signature=_signature(block.whole))
        return [BlockDelta(index=index, delta=signature), stop]

    def content(self) -> list[ContentBlock]:
        """Returns the whole blocks; a call that was cut or broke off is left out."""
        blocks = [_finished(block) for block in self._blocks]
        return [block for block in blocks if block is not None]

    def _add(self, event: Event) -> list[BlockEvent]:
        written: list[BlockEvent] = []
        kind = {"content": "text", "reasoning": "thinking"}.get(event.kind, "tool_use")
        last = self._blocks[-1] if self._blocks else None
        if last is None or last.stopped or last.start.type != kind:
            empty = ThinkingBlock(thinking="", signature="")
            written += self._open(empty if kind == "thinking" else TextBlock(text=""))
        self._blocks[-1].pieces.append(event.text)
        delta: AnthropicTextDelta | ThinkingDelta | InputDelta
        if kind == "text":
            delta = AnthropicTextDelta(text=event.text)
        elif kind == "thinking":
            delta = ThinkingDelta(thinking=event.text)
        else:
            delta = InputDelta(partial_json=event.text)
        return [*written, BlockDelta(index=len(self._blocks) - 1, delta=delta)]

    def _open(self, block: ContentBlock) -> list[BlockEvent]:
        stopped = self.stop()
        self._blocks.append(_Block(block))
        return [*stopped, BlockStart(index=len(self._blocks) - 1, content_block=block)]


def _finished(block: _Block) -> ContentBlock | None:
    if block.start.type == "text":
        return TextBlock(text=block.whole)
    if block.start.type == "thinking":
        return ThinkingBlock(thinking=block.whole, signature=_signature(block.whole))
    given = read_object(block.whole) if block.ended else None
    return None if given is None else block.start.model_copy(update={"input": given})


def _signature(thinking: str) -> str:
    """An opaque digest, which clients send back with the text."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()
