"""What an operator may tell an engine: no stream notices more than a pause."""

from collections.abc import Callable
from typing import Any

import pytest

from rayfin.actors.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    RequestHandedBack,
    RunnerGroupFailed,
)
from rayfin.actors.messages import Command

Make = Callable[..., Any]
HEAD = list(range(12))  # three pages


def test_a_drain_ends(harness: Make) -> None:
    h = harness()
    first = h.add(8, 12)
    h.step()
    h.engine.carry_out(Command.DRAIN)
    with pytest.raises(RequestHandedBack):
        h.add(8)
    h.run()
    assert not first.open
    h.engine.carry_out(Command.ADMIT)
    h.add(8)
    h.run()
    h.check()


def test_a_drain_hands_background_requests_back(harness: Make) -> None:
    h = harness(max_decoding_batch=2)
    other = h.add(8, 12)
    background = [h.add(8, 12, background=True) for _ in range(3)]
    h.step()
    h.engine.carry_out(Command.DRAIN)
    h.step()
    assert all(isinstance(own.ended.error, RequestHandedBack) for own in background)
    assert other.open
    h.run()
    h.check_stream(other)


@pytest.mark.parametrize("running", [False, True])
def test_a_cache_that_was_reset_gives_nothing(harness: Make, running: bool) -> None:
    """Nor harms those whose pages were in it."""
    h = harness()
    h.add([*HEAD, 1], 30)
    h.step()
    if not running:
        h.run()
    h.engine.carry_out(Command.RESET_CACHE)
    h.engine.check_integrity()
    before = h.engine.stats().prefix_hits
    h.add([*HEAD, 2])
    h.step()
    assert h.engine.stats().prefix_hits == before
    h.add([*HEAD, 3])
    h.run()
    assert h.engine.stats().prefix_hits == before + len(HEAD)
    h.check()


@pytest.mark.parametrize("swap", [0, 64])
def test_streams_go_on_after_a_sleep(
    harness: Make, steps_in_flight: int, scheduler: str, swap: int
) -> None:
    settings = {"num_host_pages": swap} if swap else {}
    h = harness(steps_in_flight=steps_in_flight, scheduler=scheduler, num_pages=12, **settings)
    for length in (10, 6, 14, 9, 20):
        h.add(length, 12)
    for _ in range(5):
        h.step()
    h.engine.carry_out(Command.SLEEP)
    h.engine.carry_out(Command.SLEEP)
    stats = h.engine.stats()
    assert h.executor.asleep and stats.asleep and not h.engine.has_work
    assert stats.pages_held == stats.host_pages_held == 0 and stats.seconds_since_progress == 0
    submitted = h.executor.num_submitted
    h.step()  # what the last steps gave
    h.step()
    assert h.executor.num_submitted == submitted
    with pytest.raises(RequestHandedBack):
        h.add(8)
    h.engine.carry_out(Command.WAKE)
    h.engine.carry_out(Command.WAKE)
    assert not h.executor.asleep and not h.engine.stats().asleep
    h.add(8)
    h.run()
    h.check()


def test_a_deep_sleep(harness: Make) -> None:
    """It may come after a plain one, and end in two parts."""
    h = harness()
    for length in (10, 6):
        h.add(length, 12)
    h.step()
    for first in (Command.SLEEP, Command.SLEEP_DEEP):
        h.engine.carry_out(first)
        h.step()  # what the last steps gave
        h.engine.carry_out(Command.SLEEP_DEEP)
        assert h.executor.deep and h.engine.stats().asleep
        h.engine.carry_out(Command.LOAD)
        assert not h.executor.deep and h.engine.stats().asleep
        h.engine.carry_out(Command.WAKE)
        h.step()
    h.run()
    h.check()


def test_time_runs_while_it_sleeps(harness: Make) -> None:
    h = harness()
    late = h.add(8, 12, timeout=5.0)
    h.step()
    h.engine.carry_out(Command.SLEEP)
    h.executor.clock += 6.0
    h.step()
    assert isinstance(late.ended.error, DeadlineExceeded)
    h.engine.carry_out(Command.WAKE)
    h.run()
    h.check()


def test_runners_that_die_around_a_sleep(harness: Make) -> None:
    """Before it: the engine stays awake. During it: the new ones sleep as well."""
    h = harness(steps_in_flight=2)
    h.add(8, 12)
    h.add(9, 12)
    for _ in range(3):
        h.step()
    h.executor.fail_at = {h.executor.num_run}
    with pytest.raises(EngineUnavailable):
        h.engine.carry_out(Command.SLEEP)
    assert not h.engine.stats().asleep and h.executor.epoch == 1
    h.step()
    h.engine.carry_out(Command.SLEEP)
    h.engine.replace_runners(RunnerGroupFailed("the idle runner has died"))
    assert h.executor.asleep and h.executor.epoch == 2
    h.engine.carry_out(Command.WAKE)
    h.run()
    h.check()
