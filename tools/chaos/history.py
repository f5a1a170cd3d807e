"""Checks what clients saw against the right answers. Pure: no clock, no network, no Ray.

A client records every event of a request with its time; ``check`` compares that history with the
oracle's answer. The idea is from Jepsen's and etcd's checkers; the model is one list of tokens per
choice.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema

SILENCE = 30.0
"""Seconds that an open stream may stay silent, until it gets a byte or an error."""


@dataclass(slots=True)
class Choice:
    """One choice of an answer, from the oracle or assembled by a client."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    calls: list[str] = field(default_factory=list)  # their ids; the oracle's have any
    chat: bool = False  # with calls; the oracle's answer leaves out a call that its end cuts off
    called: str = ""  # the text of the calls, which a whole answer has apart from its words

    @property
    def calls_may_be_cut(self) -> bool:
        return self.chat and self.finish_reason == "length"


@dataclass(slots=True)
class Expected:
    """The oracle's answer to a request."""

    choices: list[Choice]
    prompt_tokens: int
    form: dict[str, Any] | None = None  # JSON schema of whole answers, or of their calls


@dataclass(slots=True, frozen=True)
class Event:
    """One event of a stream, with its additions to one choice."""

    at: float  # seconds
    choice: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    calls: tuple[str, ...] = ()  # ids of those that begin
    called: str = ""  # of a call: its name once, then parts of its arguments


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Times are seconds of one clock."""

    name: str
    started: float
    stream: bool = True
    events: list[Event] = field(default_factory=list)
    bytes_at: list[float] = field(default_factory=list)  # every line, comments included
    usage: tuple[int, int] | None = None  # prompt tokens, completion tokens
    status: int | None = None  # of HTTP; None: no response
    error: str | None = None  # the code of the server's error
    broken: str | None = None  # why the connection broke
    last_id: str = ""  # of the last event
    again: int = 0  # number of resumptions
    done: bool = False  # the stream ended with [DONE]
    left: bool = False  # the client disconnected
    ended: float | None = None

    @property
    def answered(self) -> bool:
        """The answer is complete, without an error."""
        whole = self.status == 200 and self.done and self.ended is not None
        return whole and self.error is None and self.broken is None and not self.left

    @property
    def failed(self) -> bool:
        """The client stayed connected and has no complete answer."""
        return not self.left and not self.answered


@dataclass(slots=True, frozen=True)
class Violation:
    """A broken promise. ``kind`` is one of the words that ``check`` lists."""

    request: str
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.request}: {self.kind}: {self.what}"


def check(record: Record, expected: Expected, until: float) -> list[Violation]:
    """Returns all violations of a history. A failed request may have none.

    Kinds: ``lost``, ``duplicated`` or ``altered`` tokens or text; a wrong ``finish`` reason; wrong
    ``usage``; an event ``after`` the end; ``silent`` (over SILENCE seconds without a byte);
    ``open`` (not ended at ``until``); ``unclear`` (ended without an error); ``malformed`` (a whole
    answer that is not of its form); ``renamed`` (a call with another id).
    """
    violations = [*_check_choices(record, expected), *_check_times(record, until)]
    violations += _check_forms(record, expected)
    if record.answered and record.usage is not None:
        counted = sum(len(choice.tokens) for choice in expected.choices)
        if record.usage != (expected.prompt_tokens, counted):
            text = f"{record.usage}, not {(expected.prompt_tokens, counted)}"
            violations.append(Violation(record.name, "usage", text))
    return violations


def collected(events: Iterable[Event], count: int) -> list[Choice]:
    """Assembles the choices of an answer from its events."""
    choices = [Choice() for _ in range(count)]
    for event in events:
        choice = choices[event.choice]
        choice.tokens += event.tokens
        choice.text += event.text
        choice.called += event.called
        choice.finish_reason = event.finish_reason or choice.finish_reason
        choice.calls += event.calls
    return choices


def longest_gap(record: Record) -> tuple[float, float]:
    """Returns (seconds, start) of the longest time without a byte since the request."""
    times = [record.started, *record.bytes_at]
    if record.ended is not None:
        times.append(record.ended)
    return max(
        ((after - at, at) for at, after in zip(times, times[1:], strict=False)), default=(0.0, 0.0)
    )


def difference(got: Sequence[int], expected: Sequence[int]) -> str | None:
    """Describes how ``got`` differs (``lost``, ``duplicated``, ``altered``), or None if equal."""
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
    violations: list[Violation] = []
    ended: set[int] = set()
    for event in record.events:
        if event.choice in ended:
            violations.append(
                Violation(record.name, "after", f"choice {event.choice} continues after its end")
            )
        if event.finish_reason is not None:
            ended.add(event.choice)
    choices = collected(record.events, len(expected.choices))
    for index, (got, right) in enumerate(zip(choices, expected.choices, strict=True)):
        violations += _check_choice(f"{record.name}[{index}]", got, right, record.answered)
    return violations


def _check_choice(name: str, got: Choice, right: Choice, whole: bool) -> list[Violation]:
    over = whole or got.finish_reason is not None
    wanted = right.tokens if over else right.tokens[: len(got.tokens)]
    if (text := difference(got.tokens, wanted)) is not None:
        return [Violation(name, text.split()[0], text)]
    violations: list[Violation] = []
    if over and got.finish_reason != right.finish_reason:
        reasons = f"{got.finish_reason!r}, not {right.finish_reason!r}"
        violations.append(Violation(name, "finish", reasons))
    for what, got_text, whole_text in (
        ("text", got.text, right.text),
        ("called", got.called, right.called),
    ):
        text = whole_text if over else whole_text[: len(got_text)]
        cut = right.calls_may_be_cut and got_text.startswith(text)
        if got_text != text and not cut:
            violations.append(
                Violation(name, "altered", f"{what} {got_text[-20:]!r}, not {text[-20:]!r}")
            )
    return violations


def _check_forms(record: Record, expected: Expected) -> Iterator[Violation]:
    """Whole answers parse and have their form; the ids of calls follow from the request's."""
    choices = collected(record.events, len(expected.choices))
    request_id = record.last_id.partition(":")[0]
    for index, (got, right) in enumerate(zip(choices, expected.choices, strict=True)):
        name = f"{record.name}[{index}]"
        if expected.form is not None and got.finish_reason in ("stop", "tool_calls"):
            text = got.called[got.called.find(">") + 1 :] if right.calls else got.text
            try:
                jsonschema.validate(json.loads(text), expected.form)
            except (ValueError, jsonschema.ValidationError) as error:
                yield Violation(name, "malformed", f"{text[-20:]!r}: {str(error)[:60]}")
        first = len(right.calls) if record.answered else 0
        last = len(right.calls) + right.calls_may_be_cut
        count = min(max(len(got.calls), first), last)
        ids = [call_id(request_id, index, number) for number in range(count)]
        if got.calls != ids:
            yield Violation(name, "renamed", f"calls {got.calls}, not {ids}")


def call_id(request_id: str, choice: int, number: int) -> str:
    """The id of an answer's call, in OpenAI's style."""
    seed = f"{request_id}-{choice}:{number}"
    return f"call_{hashlib.sha256(seed.encode()).hexdigest()[:24]}"


def _check_times(record: Record, until: float) -> list[Violation]:
    violations: list[Violation] = []
    if record.left:
        return violations
    if record.ended is None:
        violations.append(Violation(record.name, "open", f"after {until - record.started:.1f} s"))
    elif record.status is not None and record.failed and not (record.error or record.broken):
        violations.append(
            Violation(record.name, "unclear", f"status {record.status} without an error")
        )
    gap, _ = longest_gap(record)
    if record.ended is None:
        gap = max(gap, until - max([record.started, *record.bytes_at]))
    if record.stream and gap > SILENCE:
        violations.append(Violation(record.name, "silent", f"for {gap:.1f} s"))
    return violations
