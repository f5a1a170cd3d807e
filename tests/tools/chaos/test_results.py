"""Figures of a case, the promise, and the page that they are written to."""

from dataclasses import replace
from pathlib import Path

import pytest
from cases import Case, all_cases
from faults import kill_runner
from history import Choice, Event, Expected, Record
from load import Ask
from report import BEGIN, END, HEADER, PAGE, merged, name_in, row_of, table
from results import LOST_ON_ITS_WAY, Result, judge, recovery

CASE = Case("name", "3", "something", kill_runner, may_fail=("queue_full",), may_fail_asks="short")
EXPECTED = Expected([Choice([1, 2], "ab", "length")], 3)


def ask(name: str) -> Ask:
    return Ask(name, (7, 8, 9), 2, 0)


def answered(name: str, started: float, seconds: float = 1.0) -> Record:
    end = started + seconds
    events = [Event(end, 0, (1, 2), "ab", "length")]
    return Record(name, started, events=events, bytes_at=[end], status=200, done=True, ended=end)


def refused(name: str, code: str) -> Record:
    return Record(name, 5.0, bytes_at=[5.1], status=429, error=code, ended=5.1)


def judged(records: list[Record], *, leaked: int = 0, counted: float | None = None) -> Result:
    asked = [(ask(record.name), record) for record in records]
    return judge(CASE, [4.0], asked, [EXPECTED] * len(asked), leaked, counted, 100.0)


def test_what_holds() -> None:
    result = judged([answered("a", 0.0, 7.0), answered("b", 6.0)], counted=2)
    assert result.held and (result.total, result.failed, result.wrong) == (2, 0, 0)
    assert result.gap_ms == 7000.0 and result.recovery == 3.0


def test_failures_count_and_only_some_are_allowed() -> None:
    after = answered("a", 6.0)
    held = judged([after, refused("short-1", "queue_full")])
    assert held.held and (held.failed, held.allowed) == (1, 1)
    for name, code in (("greedy-1", "queue_full"), ("short-1", "engine_error")):
        result = judged([after, refused(name, code)])
        assert not result.held and (result.failed, result.allowed) == (1, 0)


def test_leaks_and_wrong_counts_break_the_promise() -> None:
    after = answered("a", 6.0)
    assert judged([after], leaked=3).violations == ["3 pages are held"]
    assert judged([after], counted=2).violations == ["2 successes counted, 1 answers"]
    lost = refused("short-1", LOST_ON_ITS_WAY)  # with its ingress: it is unknown whether it ran
    assert not any("counted" in each for each in judged([after, lost], counted=2).violations)
    assert not judged([after, replace(answered("b", 6.0), again=1)], counted=3).violations
    refusal = refused("short-1", "queue_full")
    assert judged([after, refusal], counted=2).violations == ["2 successes counted, 1 answers"]


def test_a_wrong_token_breaks_the_promise() -> None:
    wrong = answered("a", 6.0)
    wrong.events = [Event(7.0, 0, (1, 3), "ac", "length")]
    result = judged([wrong])
    assert result.wrong == 1 and not result.held


def test_without_a_later_answer_nothing_has_recovered() -> None:
    assert "never recovered" in judged([answered("a", 0.0, 9.0)]).violations[0]


def test_recovery_is_of_the_fault_that_took_longest() -> None:
    records = [answered("a", 1.0), answered("b", 5.0, 3.0)]
    assert recovery([0.5, 4.0], records) == 4.0
    assert recovery([0.5, 9.0], records) is None
    assert recovery([], records) is None


def test_rows_of_a_page_are_replaced_and_others_stay() -> None:
    first, second = Result("one", "1", "a"), Result("two", "2", "b", total=9)
    page = f"above\n{BEGIN}\n\n{END}\nbelow\n"
    page = merged(page, [second, first], ["one", "two"], "How.")
    assert page.startswith("above\n") and page.endswith("below\n")
    page = merged(page, [Result("one", "1", "a", total=5)], ["one", "two"], "How.")
    rows = [line for line in page.splitlines() if "`)" in line]
    assert [name_in(line) for line in rows] == ["one", "two"]
    assert "0 / 5" in rows[0] and "0 / 9" in rows[1]


def test_a_row_says_what_was_broken() -> None:
    at = HEADER.index("")
    held = row_of(Result("n", "1", "f", streams=16, seed=7, load=2.44))
    assert held[at:] == ["held", "16", "7", "2.4"]
    broken = Result("n", "1", "f", violations=["`a`|b", "more"])
    assert row_of(broken)[at] == "**broken**: 'a'/b (and 1 more)"
    assert row_of(Result("n", "1", "f", skipped="no Redis"))[at] == "not run: no Redis"
    assert {len(row_of(each)) for each in (broken, Result("n", "1", "f"))} == {len(HEADER)}
    assert table([held]).count("|\n") == 3


def test_cases_have_names_of_their_own_and_the_page_knows_them() -> None:
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    shown = {
        name_in(line)
        for line in PAGE.read_text().splitlines()
        if "`)" in line and line.startswith("|")
    }
    assert shown <= set(names)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_every_case_says_what_it_breaks(case: Case) -> None:
    assert case.fault and case.row and "`" not in case.fault
    assert Path(PAGE).exists()
