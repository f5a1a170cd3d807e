"""The checker: right histories pass, and each kind of fault is reported by its name."""

from dataclasses import replace

import pytest
from history import (
    SILENCE,
    Choice,
    Event,
    Expected,
    Record,
    call_id,
    check,
    difference,
    longest_gap,
)

TOKENS = [11, 12, 13, 14, 15, 16]
TEXT = "abcdef"
EXPECTED = Expected([Choice(TOKENS, TEXT, "length")], prompt_tokens=4)


def event(at: float, first: int, last: int, reason: str | None = None) -> Event:
    return Event(at, 0, tuple(TOKENS[first:last]), TEXT[first:last], reason)


def right() -> Record:
    """The history of a stream in which nothing went wrong."""
    return Record(
        "r",
        0.0,
        events=[event(1.0, 0, 2), event(2.0, 2, 5), event(3.0, 5, 6, "length")],
        bytes_at=[1.0, 2.0, 3.0, 3.1],
        usage=(4, 6),
        status=200,
        done=True,
        ended=3.1,
    )


def kinds(record: Record, until: float = 4.0) -> list[str]:
    return [violation.kind for violation in check(record, EXPECTED, until)]


def test_a_right_history_passes() -> None:
    record = right()
    assert kinds(record) == []
    assert record.answered and not record.failed


def test_an_error_that_is_told_is_a_failure_and_no_violation() -> None:
    record = right()
    del record.events[1:]
    record.error, record.usage = "engine_unavailable", None
    assert kinds(record) == [] and record.failed


def test_what_a_failed_stream_said_before_must_be_right_too() -> None:
    record = right()
    record.events = [Event(1.0, 0, (11, 99), "ab")]
    record.error = "engine_unavailable"
    assert kinds(record) == ["altered"]


def test_a_client_that_leaves_is_owed_nothing_but_what_it_got() -> None:
    record = replace(right(), ended=None, left=True, done=False)
    del record.events[1:]
    assert kinds(record, 1000.0) == [] and not record.failed
    record.events.append(event(1.5, 3, 4))
    assert kinds(record, 1000.0) == ["altered"]  # one before it is missing


@pytest.mark.parametrize(
    ("got", "kind"),
    [
        ([11, 12, 13, 15, 16], "lost 1 tokens at 3"),
        ([11, 12, 13], "lost 3 tokens at 3"),
        ([], "lost 6 tokens at 0"),
        ([11, 12, 13, 12, 13, 14, 15, 16], "duplicated 2 tokens at 3"),
        ([11, 12, 13, 14, 15, 16, 16], "duplicated 1 tokens at 6"),
        ([11, 12, 77, 14, 15, 16], "altered at 2: [77, 14, 15, 16], not [13, 14, 15, 16]"),
        ([11, 12, 77, 13, 14, 15, 16], "altered 1 tokens at 2"),
        ([21, 22], "altered at 0: [21, 22], not [11, 12, 13, 14]"),
        (TOKENS, None),
    ],
)
def test_differences_are_told_apart(got: list[int], kind: str | None) -> None:
    assert difference(got, TOKENS) == kind


@pytest.mark.parametrize(("tokens", "kind"), [((13, 15), "lost"), ((12, 13), "duplicated")])
def test_wrong_tokens_of_a_whole_answer(tokens: tuple[int, ...], kind: str) -> None:
    record = right()
    left = TOKENS[5:] if kind == "lost" else TOKENS[3:]
    record.events = [
        event(1.0, 0, 2),
        Event(2.0, 0, tokens),
        Event(3.0, 0, tuple(left), "", "length"),
    ]
    assert kinds(record) == [kind]


def test_wrong_text_of_right_tokens() -> None:
    record = right()
    record.events[1] = replace(record.events[1], text="cd")
    assert kinds(record) == ["altered"]


def test_wrong_finish_reason() -> None:
    record = right()
    record.events[2] = replace(record.events[2], finish_reason="stop")
    assert kinds(record) == ["finish"]


def test_missing_finish_reason() -> None:
    record = right()
    record.events[2] = replace(record.events[2], finish_reason=None)
    assert kinds(record) == ["finish"]


def test_an_event_after_the_end() -> None:
    record = right()
    record.events.append(Event(3.05, 0, (), "", "length"))
    assert kinds(record) == ["after"]


def test_wrong_usage() -> None:
    assert kinds(replace(right(), usage=(4, 7))) == ["usage"]


def test_silence_between_bytes_and_before_the_first() -> None:
    late = SILENCE + 5.0
    record = replace(right(), bytes_at=[1.0, 2.0, late], ended=late)
    assert kinds(record, 100.0) == ["silent"]
    assert longest_gap(record) == (late - 2.0, 2.0)
    assert kinds(replace(right(), bytes_at=[late], ended=late), 100.0) == ["silent"]


def test_a_comment_is_a_byte() -> None:
    record = replace(right(), bytes_at=[1.0, 20.0, 40.0], ended=40.0)
    assert kinds(record, 100.0) == []


def test_a_stream_that_stays_open() -> None:
    record = replace(right(), ended=None, done=False)
    del record.events[1:]
    record.bytes_at = [1.0]
    assert kinds(record, 5.0) == ["open"]
    assert kinds(record, 100.0) == ["open", "silent"]


def test_an_end_without_a_word() -> None:
    assert kinds(Record("r", 0.0, status=500, ended=1.0)) == ["unclear"]


def test_choices_are_checked_one_by_one() -> None:
    expected = Expected([Choice([1, 2], "ab", "length"), Choice([3, 4], "cd", "length")], 4)
    record = replace(right(), usage=(4, 4))
    record.events = [
        Event(1.0, 1, (3, 4), "cd", "length"),
        Event(2.0, 0, (1, 3), "ac", "length"),
    ]
    found = check(record, expected, 4.0)
    assert [(violation.request, violation.kind) for violation in found] == [("r[0]", "altered")]


# Answers with a form, and calls.

FORM = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}
CALLED = '<plan>{"city": "Rome"}'
CALLING = Expected([Choice([1, 2, 3], "", "tool_calls", ["call_any"], called=CALLED)], 4, FORM)


def calling(text: str = CALLED, ids: tuple[str, ...] | None = None) -> Record:
    """The history of a stream with one call, in two pieces."""
    if ids is None:
        ids = (call_id("r1", 0, 0),)
    events = [
        Event(1.0, 0, (), "", None, ids, text[:8]),
        Event(1.1, 0, (1, 2, 3), "", "tool_calls", (), text[8:]),
    ]
    return replace(right(), events=events, usage=(4, 3), last_id="r1:9")


@pytest.mark.parametrize(
    "record, found",
    [
        (calling(), []),
        (calling(ids=()), ["renamed"]),
        (calling(ids=(call_id("r2", 0, 0),)), ["renamed"]),
        (calling(ids=(call_id("r1", 0, 0),) * 2), ["renamed"]),
        (calling(text='<plan>{"city": "Rome"'), ["altered", "malformed"]),
        (calling(text='<plan>{"city": 7}'), ["altered", "malformed"]),
    ],
)
def test_calls(record: Record, found: list[str]) -> None:
    assert [violation.kind for violation in check(record, CALLING, 4.0)] == found


def test_a_call_that_breaks_off_has_its_id() -> None:
    record = calling()
    del record.events[1:]
    record.broken = "gone"
    assert check(record, CALLING, 4.0) == []
    record.events[0] = replace(record.events[0], calls=("call_other",))
    assert [violation.kind for violation in check(record, CALLING, 4.0)] == ["renamed"]


def test_a_stream_has_what_a_whole_answer_leaves_out() -> None:
    """The end of the answer cuts its second call off."""
    choice = Choice([1, 2, 3], "", "length", ["call_any"], chat=True, called=CALLED)
    events = [
        Event(1.0, 0, (), "", None, (call_id("r1", 0, 0),), CALLED),
        Event(1.1, 0, (1, 2, 3), "", "length", (call_id("r1", 0, 1),), '<plan>{"ci'),
    ]
    record = replace(calling(), events=events)
    assert check(record, Expected([choice], 4, FORM), 4.0) == []
    found = check(record, Expected([replace(choice, chat=False)], 4, FORM), 4.0)
    assert [violation.kind for violation in found] == ["altered", "renamed"]


def test_a_stream_may_have_words_behind_a_call() -> None:
    """A whole answer has its words and its calls apart, and does not say which came first."""
    record = calling()
    first, last = record.events
    record.events = [first, replace(last, finish_reason=None)]
    record.events.append(Event(1.2, 0, (), "Done.", "tool_calls"))
    choice = replace(CALLING.choices[0], text="Done.")
    assert check(record, replace(CALLING, choices=[choice]), 4.0) == []
    record.events[-1] = replace(record.events[-1], text="Gone.")
    found = check(record, replace(CALLING, choices=[choice]), 4.0)
    assert [violation.kind for violation in found] == ["altered"]


def test_a_text_has_its_form_if_it_is_whole() -> None:
    cut = Expected([Choice(TOKENS, '{"city', "length")], 4, FORM)
    events = [Event(1.0, 0, tuple(TOKENS), '{"city', "length")]
    assert check(replace(right(), events=events), cut, 4.0) == []
    whole = Expected([Choice(TOKENS, '{"city', "stop")], 4, FORM)
    events = [Event(1.0, 0, tuple(TOKENS), '{"city', "stop")]
    found = check(replace(right(), events=events), whole, 4.0)
    assert [violation.kind for violation in found] == ["malformed"]
