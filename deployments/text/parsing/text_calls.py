"""Calls of custom tools: functions of one text, which is all that their clients see."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from rayfin.deployments.text.messages import INPUT
from rayfin.deployments.text.parsing.events import Event, Piece
from rayfin.deployments.text.parsing.parser import OutputParser

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_START = f'{{"{INPUT}":"'
_WHOLE = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_HIGH = re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB]..)$")  # of a pair whose low half may come


class TextCallParser(OutputParser):
    """Reads an answer; the arguments of custom tools are the pieces of their text.

    Args:
        custom: their names.
    """

    def __init__(self, custom: Collection[str], *args: Any, **settings: Any) -> None:
        self._custom = custom
        self._text: _Text | None = None  # of the call that is open
        super().__init__(*args, **settings)

    def push(self, pieces: Sequence[Piece]) -> list[Event]:
        return self._as_text(super().push(pieces))

    def finish(self, reason: str) -> list[Event]:
        return self._as_text(super().finish(reason))

    def _as_text(self, events: list[Event]) -> list[Event]:
        shown = []
        for event in events:
            if event.kind == "call":
                self._text = _Text() if event.name in self._custom else None
            elif event.kind == "arguments" and self._text is not None:
                event = event._replace(text=self._text.push(event.text))
            if event.text or event.kind != "arguments":
                shown.append(event)
        return shown


class _Text:
    """The text in the arguments of one call; they themselves, where they hold anything else."""

    def __init__(self) -> None:
        self._held = ""
        self._place = "head"  # or "text", "end", "other"

    def push(self, piece: str) -> str:
        """Returns what is certain of the text with a further piece of the arguments."""
        self._held += piece
        if self._place == "head":
            head = _HEAD.match(self._held)
            if head is not None:
                self._held, self._place = self._held[head.end() :], "text"
            elif not _START.startswith("".join(self._held.split())):
                self._place = "other"
        if self._place == "other":
            text, self._held = self._held, ""
            return text
        return self._unescaped() if self._place == "text" else ""

    def _unescaped(self) -> str:
        match = _WHOLE.match(self._held)
        whole = match[0] if match is not None else ""
        high = _HIGH.search(whole)
        if high is not None and self._held[len(whole) :][:1] in ("", "\\"):
            whole = whole[: high.start(1)]
        self._held = self._held[len(whole) :]
        if self._held.startswith('"'):
            self._place = "end"
        text: str = json.loads(f'"{whole}"', strict=False)
        if text.isascii():
            return text
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
