"""What goes into an output parser, and what comes out."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

EventKind = Literal["reasoning", "content", "call", "arguments", "call_end"]


class Piece(NamedTuple):
    """A part of an answer: its text, or one token that is a marker, by its text."""

    text: str = ""
    marker: str = ""


class Event(NamedTuple):
    """A part of an answer, by what it is.

    A call has a ``call_end`` only if its arguments are one whole JSON object. One that was cut, or
    broke off, ends without it where the next event or the answer's end comes.
    """

    kind: EventKind
    text: str = ""  # of arguments: a piece of the final JSON text
    index: int = 0  # type: ignore[assignment]  # of the call, from 0
    name: str = ""  # of the function: whole, in "call"


new_event: "Callable[[tuple[EventKind, str, int, str]], Event]" = partial(tuple.__new__, Event)
"""Makes an event in half the time, for those of which each token makes one."""


class EventWriter:
    """Collects the events of an answer and counts its calls.

    Args:
        functions: the name of each function, and the JSON schema of its parameters.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        self.functions = functions
        self.calls = 0  # that have begun
        self.is_open = False  # the last one has not ended
        self.named = False  # a function was, whether or not its call has begun
        self.in_thought = False  # a call ends a thought
        self.unparsed = 0  # calls that became content
        self.cut = 0  # calls without an end
        self._events: list[Event] = []
        self._kind: EventKind = "content"  # of texts that become one event
        self._texts: list[str] = []

    def drain(self) -> list[Event]:
        """Returns the events since the last call."""
        self._flush()
        events, self._events = self._events, []
        return events

    def add(self, kind: EventKind, text: str) -> None:
        """Adds text; of arguments it is the open call's."""
        if kind != self._kind:
            self._flush()
            self._kind = kind
        if text:
            self._texts.append(text)

    def find(self, name: str) -> str | None:
        """Returns the function that a model means by this name, or None."""
        short = name.removeprefix("functions.")
        known = name if name in self.functions else short if short in self.functions else None
        self.named = self.named or known is not None
        return known

    def begin(self, name: str) -> None:
        """Begins a call."""
        self._flush()
        self._events.append(Event("call", "", self.calls, name))
        self.calls += 1
        self.is_open = True
        self.in_thought = False

    def arguments(self, text: str) -> None:
        """Adds a piece of the open call's arguments."""
        self.add("arguments", text)

    def end(self) -> None:
        """Ends the open call, whose arguments are whole."""
        self._flush()
        self._events.append(Event("call_end", "", self.calls - 1))
        self.is_open = False

    def give_up(self) -> None:
        """Ends the open call, whose arguments are not whole."""
        self.is_open = False
        self.cut += 1

    def _flush(self) -> None:
        if self._texts:
            index = self.calls - 1 if self._kind == "arguments" else 0
            self._events.append(new_event((self._kind, "".join(self._texts), index, "")))
            self._texts.clear()
