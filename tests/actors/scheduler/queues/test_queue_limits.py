"""What a full queue says, and that its sums follow every way out of it."""

from collections.abc import Callable
from typing import Any

import pytest

from rayfin.actors.errors import Overloaded

Make = Callable[..., Any]


def _sums(h: Any) -> tuple[int, int]:
    newcomers = h.engine.lifecycle.state.queue_limits
    return newcomers.num_requests, newcomers.num_tokens


def test_too_many_requests(harness: Make) -> None:
    h = harness(max_waiting_requests=2)
    h.add(3)
    h.add(3)
    with pytest.raises(Overloaded, match="of at most 2 .max_waiting_requests"):
        h.add(3)
    h.run()
    h.check()


def test_too_many_tokens(harness: Make) -> None:
    h = harness(max_waiting_tokens=20, max_decoding_batch=1)
    h.add(12)
    h.add(8)
    with pytest.raises(Overloaded, match="20 prompt tokens .* over 20 .max_waiting_tokens"):
        h.add(1)
    h.step()  # the first one runs
    h.add(12)
    assert _sums(h) == (2, 20)
    h.run()
    h.check()
    assert _sums(h) == (0, 0)


def test_an_empty_queue_takes_a_prompt_of_any_length(harness: Make) -> None:
    h = harness(max_waiting_tokens=20)
    h.add(60)
    with pytest.raises(Overloaded):
        h.add(1)
    h.run()
    h.check()


def test_every_way_out_is_counted(harness: Make) -> None:
    h = harness(max_waiting_tokens=100, max_decoding_batch=1, step_seconds=1.0)
    first, aborted, expired = h.add(5, 9), h.add(6), h.add(7, timeout=1.5)
    assert _sums(h) == (3, 18)
    h.step()
    assert _sums(h) == (2, 13)
    h.abort(aborted)
    assert _sums(h) == (1, 7)
    h.step()
    h.step()
    assert not expired.open and _sums(h) == (0, 0)
    h.abort(first)
    assert _sums(h) == (0, 0)
    h.run()
    h.check()


def test_preempted_and_restarted_requests_turn_nobody_away(harness: Make) -> None:
    h = harness(max_waiting_requests=2, max_waiting_tokens=14, num_pages=4, max_model_len=16)
    h.add(7, 8)
    victim = h.add(7, 8)
    for _ in range(20):
        h.step()
        if h.engine.lifecycle.state.counters.preemptions:
            break
    assert len(h.engine.lifecycle.state.waiting) == 1 and _sums(h) == (0, 0)
    h.add(7, 2)
    assert _sums(h) == (1, 7)
    h.abort(victim)  # its own end takes nothing off what newcomers have
    assert _sums(h) == (1, 7)
    h.executor.fail_at = {h.executor.num_run}
    h.run()
    h.check()
    assert h.executor.epoch == 1 and _sums(h) == (0, 0)
