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
        self.in_thought = False  # a call ends a thought
        self.unparsed = 0  # calls that became content
        self.cut = 0  # calls without an end
        self._events: list[Event] = []

    def drain(self) -> list[Event]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events

    def add(self, kind: EventKind, text: str) -> None:
        """Adds text that is no part of a call."""
        if text:
            self._events.append(new_event((kind, text, 0, "")))

    def find(self, name: str) -> str | None:
        """Returns the function that a model means by this name, or None."""
        if name in self.functions:
            return name
        short = name.removeprefix("functions.")
        return short if short in self.functions else None

    def begin(self, name: str) -> None:
        """Begins a call."""
        self._events.append(Event("call", "", self.calls, name))
        self.calls += 1
        self.is_open = True
        self.in_thought = False

    def arguments(self, text: str) -> None:
        """Adds a piece of the open call's arguments."""
        if text:
            self._events.append(new_event(("arguments", text, self.calls - 1, "")))

    def end(self) -> None:
        """Ends the open call, whose arguments are whole."""
        self._events.append(Event("call_end", "", self.calls - 1))
        self.is_open = False

    def give_up(self) -> None:
        """Ends the open call, whose arguments are not whole."""
        self.is_open = False
        self.cut += 1
