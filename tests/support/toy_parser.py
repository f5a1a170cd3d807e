"""A parser of one small format: ``<think>``, ``<tool_call>{"name": ..., "arguments": ...}``."""

import json
from collections.abc import Sequence

from rayfin.deployments.text.parsing.events import Event, Piece

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


class ToyParser:
    """Knows its marks by their tokens only; a call's JSON is read when it is whole."""

    markers = frozenset(MARKS)
    unparsed = 0
    holds_back = False

    def __init__(self, starts_inside: bool = False) -> None:
        self.in_reasoning = starts_inside
        self._call: str | None = None
        self._calls = 0

    def push(self, pieces: Sequence[Piece]) -> list[Event]:
        return [event for piece in pieces for event in self._push(piece)]

    def finish(self, reason: str) -> list[Event]:
        return []

    def _push(self, piece: Piece) -> list[Event]:
        if not piece.marker:
            if self._call is not None:
                self._call += piece.text
                return []
            kind = "reasoning" if self.in_reasoning else "content"
            return [Event(kind, piece.text)]  # type: ignore[arg-type]
        if piece.marker in ("<think>", "</think>"):
            self.in_reasoning = piece.marker == "<think>"
        elif piece.marker == "<tool_call>":
            self._call = ""
        elif self._call is not None:
            call, self._call, index = json.loads(self._call), None, self._calls
            self._calls += 1
            return [
                Event("call", index=index, name=call["name"]),
                Event("arguments", json.dumps(call["arguments"]), index),
                Event("call_end", index=index),
            ]
        return []
