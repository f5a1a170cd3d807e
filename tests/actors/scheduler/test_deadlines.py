"""A request's own time limit: nothing runs after it (I14)."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from rayfin.actors.errors import DeadlineExceeded, InvalidRequest

Make = Callable[..., Any]


def _exceeded(stream: Any) -> str:
    assert stream.ended.finish_reason == "error"
    assert isinstance(stream.ended.error, DeadlineExceeded)
    assert stream.ended.error.param == "timeout"
    return stream.ended.error.message


def test_waiting_request_is_dropped_before_its_prefill(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler, max_decoding_batch=1, step_seconds=1.0)
    busy = h.add(4, 10)
    waits = h.add(4, 10, timeout=2.5)
    h.run()
    assert len(busy.tokens) == 10
    assert waits.tokens == [] and h.executor.entered == [busy.seed]
    message = _exceeded(waits)
    assert "timeout of 2.5 s" in message and "waited 3.000 s" in message
    assert h.engine.stats().finished == {"error": 1, "length": 1}
    h.check()


def test_running_request_ends(harness: Make, scheduler: str, steps_in_flight: int) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight, step_seconds=1.0)
    late, other = h.add(4, 30, timeout=5.0), h.add(4, 30)
    h.run()
    h.check()
    assert 4 <= len(late.tokens) <= 5
    assert "waited 0.000 s" in _exceeded(late)
    assert len(other.tokens) == 30


def test_done_in_time(harness: Make) -> None:
    h = harness(step_seconds=1.0)
    stream = h.add(4, 3, timeout=100.0)
    h.run()
    h.check()
    assert stream.ended.finish_reason == "length"
    h.executor.clock += 1000
    assert h.engine.step() == {}
    assert len(h.engine._endings.deadlines) == 0


def test_aborted_requests_are_not_watched(harness: Make) -> None:
    h = harness(max_decoding_batch=1)
    streams = [h.add(4, 3, timeout=1.0) for _ in range(3)]
    h.step()
    for stream in streams:
        h.abort(stream)
    assert len(h.engine._endings.deadlines) == 0
    h.executor.clock += 2
    h.run()
    h.check()


def test_deadline_counts_from_arrival_also_after_a_restart(harness: Make) -> None:
    h = harness(step_seconds=1.0, steps_in_flight=1)
    h.executor.fail_at = {3}
    stream = h.add(4, 30, timeout=6.5)
    h.run()
    h.check()
    assert h.executor.epoch == 1 and "waited 0.000 s" in _exceeded(stream)
    assert len(stream.tokens) == 7


def test_its_pages_stay_good_for_others(harness: Make) -> None:
    """What ran out of time was computed right: the prefix index keeps it."""
    h = harness(step_seconds=1.0)
    prompt = list(range(20))
    h.add(prompt, 20, timeout=3.0)
    h.run()
    again = h.add(prompt, 2)
    h.run()
    h.check()
    assert again.ended.cached_tokens > 0


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.nan])
def test_no_time_is_refused(harness: Make, timeout: float) -> None:
    h = harness()
    with pytest.raises(InvalidRequest) as caught:
        h.add(3, timeout=timeout)
    assert caught.value.param == "timeout"
    assert not h.engine.has_work


def test_no_limit_but_in_name(harness: Make) -> None:
    h = harness(step_seconds=1e6)
    stream = h.add(3, 5, timeout=math.inf)
    h.run()
    h.check()
    assert stream.ended.finish_reason == "length"
