"""What goes into an output parser, and what comes out."""

from typing import Literal, NamedTuple

EventKind = Literal["reasoning", "content", "call", "arguments", "call_end"]


class Piece(NamedTuple):
    """A part of an answer: its text, or one token that is a marker, by its text."""

    text: str = ""
    marker: str = ""


class Event(NamedTuple):
    """A part of an answer, by what it is."""

    kind: EventKind
    text: str = ""  # of arguments: a piece of the final JSON text
    index: int = 0  # of the call, from 0
    name: str = ""  # of the function: whole, in "call"
