"""An answer's texts and marker tokens into a parser, and stop strings between the two."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rayfin.deployments.text.parsing.events import Event, Piece
from rayfin.deployments.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from rayfin.deployments.text.parsing.parser import OutputParser


class AnswerParts:
    """Reads one answer through a parser. Stop strings count in content and calls only.

    A mark that is one added token is known by its id: text that looks like it stays text.

    Args:
        added: ids of the tokenizer's added tokens, by text.
        hidden: ids whose text is left out (``skip_special_tokens``); no stop string is in it.
        stops: None if the request has none.
    """

    def __init__(
        self,
        parser: "OutputParser",
        added: Mapping[str, int],
        hidden: frozenset[int],
        stops: StopStrings | None,
    ) -> None:
        self._parser = parser
        self._hidden = hidden
        self._stops = stops
        self.markers = {added[text]: text for text in parser.markers if text in added}
        self.reasoning_tokens = 0
        self._events: list[Event] = []

    def push(self, text: str, token: int | None, armed: bool) -> str | None:
        """Reads a token: ``text`` is its text, or what it cuts off if it is a marker.

        Returns:
            The stop string that ends the answer, or None.
        """
        inside = self._parser.in_reasoning
        marker = "" if token is None else self.markers.get(token, "")
        hit = self._push_text(text, armed)
        if hit is None and marker:
            hit = self._push_marker(marker, token not in self._hidden, armed)
        if token is not None and inside and self._parser.in_reasoning:
            self.reasoning_tokens += 1
        return hit

    def finish(self, reason: str) -> None:
        """Ends the answer."""
        if self._stops is not None:
            self._read(self._stops.flush())
        self._events += self._parser.finish(reason)

    def take(self) -> list[Event]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def holds_back(self) -> bool:
        """There is text that may be the beginning of a mark."""
        return self._parser.holds_back

    @property
    def unparsed(self) -> int:
        """Calls that did not parse and became content."""
        return self._parser.unparsed

    def _read(self, text: str) -> None:
        if text:
            self._events += self._parser.push([Piece(text)])

    def _push_text(self, text: str, armed: bool) -> str | None:
        if self._stops is None:
            self._read(text)
            return None
        at = 0
        while at < len(text) and self._parser.in_reasoning:  # the thought may end in this text
            self._read(text[at])
            at += 1
        shown, hit = self._stops.push(text[at:], armed)
        self._read(shown)
        return hit

    def _push_marker(self, marker: str, visible: bool, armed: bool) -> str | None:
        """A stop string may be a marker's text, and does not reach over it."""
        if self._stops is not None and not self._parser.in_reasoning:
            shown, hit = self._stops.push(marker if visible else "", armed)
            if hit is not None and not shown.endswith(marker):
                self._read(shown)
                return hit
            if hit is None:
                shown += self._stops.flush()
            self._read(shown.removesuffix(marker) if visible else shown)
            if hit is not None:
                self._events += self._parser.push([Piece(marker=marker)])
                return hit
        self._events += self._parser.push([Piece(marker=marker)])
        return None
