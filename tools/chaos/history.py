"""What clients saw, held against what they had to see. Pure: no clock, no network, no Ray.

A client writes down every event of a request with its time; ``check`` replays that history against
the oracle's answer. Source of the idea: Jepsen's and etcd's checkers, whose model here is one list
of tokens per choice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SILENCE = 30.0
"""Seconds that an open stream may stay without a byte, an error included (docs/reliability.md)."""


@dataclass(slots=True)
class Choice:
    """One choice of an answer: as the oracle has it, or as a client has put it together."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


@dataclass(slots=True)
class Expected:
    """The oracle's answer to a request."""

    choices: list[Choice]
    prompt_tokens: int


@dataclass(slots=True, frozen=True)
class Event:
    """One event of a stream: what it adds to one choice."""

    at: float  # seconds
    choice: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None


@dataclass(slots=True)
class Record:
    """One request as its client saw it; times in seconds of one clock."""

    name: str
    started: float
    stream: bool = True
    events: list[Event] = field(default_factory=list)
    bytes_at: list[float] = field(default_factory=list)  # every line, comments included
    usage: tuple[int, int] | None = None  # prompt tokens, completion tokens
    status: int | None = None  # HTTP's; None: no answer
    error: str | None = None  # the code of an error that the server told
    broken: str | None = None  # why the connection ended early
    last_id: str = ""  # of the last event
    again: int = 0  # times that it was asked again, after it broke off
    done: bool = False  # the end of the stream was told: [DONE]
    left: bool = False  # the client closed it
    ended: float | None = None

    @property
    def answered(self) -> bool:
        """A whole answer came: nothing failed, nothing broke off."""
        whole = self.status == 200 and self.done and self.ended is not None
        return whole and self.error is None and self.broken is None and not self.left

    @property
    def failed(self) -> bool:
        """The client asked and stayed, and has no whole answer."""
        return not self.left and not self.answered


@dataclass(slots=True, frozen=True)
class Violation:
    """Something that must never be. ``kind`` is one of a closed set of words (see ``check``)."""

    request: str
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.request}: {self.kind}: {self.what}"


def check(record: Record, expected: Expected, until: float) -> list[Violation]:
    """All that is wrong with a history; empty for a right one, failed or not.

    Kinds: ``lost``, ``duplicated``, ``altered`` tokens or text; wrong ``finish`` reason; wrong
    ``usage``; an event ``after`` the end; ``silent``: open for over SILENCE seconds without a byte;
    ``open``: still so at ``until``; ``unclear``: it ended without a word.
    """
    found = [*_check_choices(record, expected), *_check_times(record, until)]
    if record.answered and record.usage is not None:
        counted = sum(len(choice.tokens) for choice in expected.choices)
        if record.usage != (expected.prompt_tokens, counted):
            told = f"{record.usage}, not {(expected.prompt_tokens, counted)}"
            found.append(Violation(record.name, "usage", told))
    return found


def collected(events: Iterable[Event], count: int) -> list[Choice]:
    """The choices of an answer, put together from its events."""
    choices = [Choice() for _ in range(count)]
    for event in events:
        own = choices[event.choice]
        own.tokens += event.tokens
        own.text += event.text
        own.finish_reason = event.finish_reason or own.finish_reason
    return choices


def longest_gap(record: Record) -> tuple[float, float]:
    """(seconds, when it began) of the longest time without a byte, from the request on."""
    times = [record.started, *record.bytes_at]
    if record.ended is not None:
        times.append(record.ended)
    return max(
        ((after - at, at) for at, after in zip(times, times[1:], strict=False)), default=(0.0, 0.0)
    )


def difference(got: Sequence[int], expected: Sequence[int]) -> str | None:
    """How ``got`` differs: ``lost``, ``duplicated`` or ``altered``; None if it is equal."""
    if list(got) == list(expected):
        return None
    same = next(
        (at for at, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b),
        min(len(got), len(expected)),
    )
    rest, wanted = list(got[same:]), list(expected[same:])
    if rest == wanted[len(wanted) - len(rest) :]:
        return f"lost {len(wanted) - len(rest)} tokens at {same}"
    again = len(rest) - len(wanted)
    if again > 0 and list(got[same + again :]) == wanted:
        repeated = rest[:again] == list(expected[max(0, same - again) : same])
        return f"{'duplicated' if repeated else 'altered'} {again} tokens at {same}"
    return f"altered at {same}: {rest[:4]}, not {wanted[:4]}"


def _check_choices(record: Record, expected: Expected) -> list[Violation]:
    found: list[Violation] = []
    ended: set[int] = set()
    for event in record.events:
        if event.choice in ended:
            found.append(Violation(record.name, "after", f"choice {event.choice} goes on"))
        if event.finish_reason is not None:
            ended.add(event.choice)
    choices = collected(record.events, len(expected.choices))
    for index, (own, right) in enumerate(zip(choices, expected.choices, strict=True)):
        found += _check_choice(f"{record.name}[{index}]", own, right, record.answered)
    return found


def _check_choice(name: str, own: Choice, right: Choice, whole: bool) -> list[Violation]:
    over = whole or own.finish_reason is not None
    wanted = right.tokens if over else right.tokens[: len(own.tokens)]
    if (how := difference(own.tokens, wanted)) is not None:
        return [Violation(name, how.split()[0], how)]
    found: list[Violation] = []
    if over and own.finish_reason != right.finish_reason:
        told = f"{own.finish_reason!r}, not {right.finish_reason!r}"
        found.append(Violation(name, "finish", told))
    text = right.text if over else right.text[: len(own.text)]
    if own.text != text:
        found.append(Violation(name, "altered", f"text {own.text[-20:]!r}, not {text[-20:]!r}"))
    return found


def _check_times(record: Record, until: float) -> list[Violation]:
    found: list[Violation] = []
    if record.left:
        return found
    if record.ended is None:
        found.append(Violation(record.name, "open", f"after {until - record.started:.1f} s"))
    elif record.status is not None and record.failed and not (record.error or record.broken):
        found.append(Violation(record.name, "unclear", f"status {record.status}, and no word"))
    gap, _ = longest_gap(record)
    if record.ended is None:
        gap = max(gap, until - max([record.started, *record.bytes_at]))
    if record.stream and gap > SILENCE:
        found.append(Violation(record.name, "silent", f"for {gap:.1f} s"))
    return found
