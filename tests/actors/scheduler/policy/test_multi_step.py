"""Several decode steps in one call: when they are granted, and that no client can tell."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rayfin.actors.scheduler.policy.multi_step import CALL_SECONDS, CALLS_OF_WORK, MultiStepPolicy

pytestmark = pytest.mark.slow(reason="many engines")

Make = Callable[..., Any]
FAST = {"max_lease": 16, "step_seconds": 0.0001}


def _leases(h: Any) -> list[int]:
    return [step.num_steps for step in h.executor.log]


def _watch(h: Any) -> list[SimpleNamespace]:
    """Notes what the engine looked like around each grant."""
    grants: list[SimpleNamespace] = []
    policy, lifecycle = h.engine._multi_step, h.engine.lifecycle
    grant = policy.grant

    def watched(decoding: Any) -> int:
        before = (lifecycle.state.tables.held.copy(), lifecycle.state.counters.preemptions)
        waiting, prefilling = len(lifecycle.state.waiting), len(lifecycle.state.running.prefilling)
        num_steps = grant(decoding)
        assert lifecycle.state.counters.preemptions == before[1], "a lease preempts"
        assert num_steps > 1 or np.array_equal(lifecycle.state.tables.held, before[0]), (
            "pages for nothing"
        )
        grants.append(SimpleNamespace(num_steps=num_steps, waiting=waiting, prefilling=prefilling))
        return num_steps

    policy.grant = watched
    return grants


def test_steady_decode(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=1, **FAST)
    h.add(5, 40)
    h.run()
    h.check()
    assert _leases(h) == [1, 16, 16, 7]  # 1 + 16 + 16 + 7 = 40 tokens
    assert h.engine.stats().steps == 40
    assert h.engine.stats().generation_tokens == 40


def test_two_leases_in_flight(harness: Make) -> None:
    h = harness(steps_in_flight=2, **FAST)
    h.add(5, 40)
    h.run()
    h.check()
    assert _leases(h) == [1, 1, 16, 16, 6]  # the second call goes before a step was measured
    assert [step.kv_len.tolist() for step in h.executor.log] == [[0], [5], [6], [22], [38]]


@pytest.mark.parametrize("most", [1, 2, 7, 16])
def test_max_lease(harness: Make, most: int) -> None:
    h = harness(max_lease=most, step_seconds=0.0001)
    h.add(5, 40)
    h.run()
    h.check()
    assert max(_leases(h)) == most


@pytest.mark.parametrize("seconds", [0.00031, 0.0009, 0.0013, 0.0048, 0.1])
def test_slow_steps_get_short_leases(harness: Make, seconds: float) -> None:
    """A multi-step call takes a few calls' time, so that no request waits for long."""
    h = harness(max_lease=16, step_seconds=seconds)
    h.add(5, 60)
    h.run()
    h.check()
    assert max(_leases(h)) == math.ceil(CALL_SECONDS * CALLS_OF_WORK / seconds)


def test_no_measurement_no_lease(harness: Make) -> None:
    h = harness(max_lease=16, step_seconds=0.0)
    h.add(5, 20)
    h.run()
    h.check()
    assert set(_leases(h)) == {1}


def test_policy_follows_the_measured_time(harness: Make) -> None:
    """Of a step, not of a call: a lease of 16 that takes 16 times as long changes nothing."""
    h = harness()
    own = h.engine._multi_step
    policy = MultiStepPolicy(h.engine.lifecycle.state, own._microbatcher, 16, own._drafts)
    policy.observe(0.001, 1)
    policy.observe(0.016, 16)
    assert policy._step_seconds == pytest.approx(0.001)
    for _ in range(50):
        policy.observe(0.1, 1)
    assert policy._step_seconds == pytest.approx(0.1, rel=0.01)
    assert policy.grant(np.zeros(0, np.int64)) == 1


def test_nobody_waits_for_a_lease(harness: Make, scheduler: str, steps_in_flight: int) -> None:
    """1 whenever somebody waits or is in the middle of a prompt."""
    h = harness(
        scheduler=scheduler,
        steps_in_flight=steps_in_flight,
        max_decoding_batch=3,
        max_batch_tokens=6,
        **FAST,
    )
    grants = _watch(h)
    for turn in range(12):
        h.add(1 + turn * 5 % 40, 3 + turn * 7 % 30)
        if turn % 4 == 3:
            for _ in range(9):
                h.step()
    h.run()
    h.check()
    busy = [grant for grant in grants if grant.waiting or grant.prefilling]
    assert busy and all(grant.num_steps == 1 for grant in busy)
    assert any(grant.num_steps > 1 for grant in grants)


def test_prompt_that_pauses_is_not_kept_waiting(harness: Make) -> None:
    """Without a chunk in this step, because decoding rows have taken all of its tokens."""
    h = harness(max_batch_tokens=3, max_decoding_batch=4, steps_in_flight=1, **FAST)
    for length in (1, 1, 4, 9):
        h.add(length, 20)
    grants = _watch(h)
    h.run()
    h.check()
    paused = [grant for grant in grants if grant.prefilling]
    assert all(grant.num_steps == 1 for grant in paused)
    running = h.engine.lifecycle.state.running
    h.add(3, 20)
    h.step()
    assert h.engine._multi_step.grant(running.decodable()) == 16
    running.prefilling[3] = None
    assert h.engine._multi_step.grant(running.decodable()) == 1


def test_newcomer_is_admitted_by_the_next_call(harness: Make) -> None:
    h = harness(steps_in_flight=1, **FAST)
    h.add(5, 60)
    for _ in range(3):
        h.step()
    assert _leases(h)[-1] == 16
    h.add(7, 5)
    h.step()
    assert h.executor.log[-1].prefill_batch == 1 and _leases(h)[-1] == 1
    h.run()
    h.check()


def test_rows_end_at_their_own_limits(harness: Make, steps_in_flight: int) -> None:
    """The lease is as long as its longest row; the others end within it."""
    h = harness(steps_in_flight=steps_in_flight, **FAST)
    streams = [h.add(3, most) for most in (3, 4, 9, 12)]
    h.run()
    h.check()
    assert [len(stream.tokens) for stream in streams] == [3, 4, 9, 12]
    assert max(_leases(h)) == 13 - 1 - steps_in_flight
    assert h.engine.stats().generation_tokens == 28


def test_no_longer_than_the_longest_row(harness: Make) -> None:
    h = harness(steps_in_flight=1, **FAST)
    h.add(3, 6)
    h.run()
    assert _leases(h) == [1, 5]


def test_stop_in_the_middle(harness: Make, steps_in_flight: int) -> None:
    """Its row is over; the others go on; what the row says in a lease on its way is dropped."""
    free = harness()
    tokens = [free.add(length, 30) for length in (5, 6, 7)]
    free.run()
    h = harness(steps_in_flight=steps_in_flight, **FAST)
    for stream, at in zip(tokens, (7, 40, 12), strict=True):
        h.add(len(stream.source.prompt), 30, stop=stream.tokens[at : at + 1])
    h.run()
    h.check()
    assert sum(len(s.tokens) for s in h.streams.values()) == h.engine.stats().generation_tokens
    assert h.engine.stats().finished == {"stop": 2, "length": 1}


def test_tokens_come_in_order_and_in_one_message(harness: Make) -> None:
    h = harness(steps_in_flight=1, **FAST)
    streams = [h.add(4, 20, client=client) for client in "aba"]
    h.step()
    messages = h.engine.step()
    assert messages.keys() == {"a", "b"}
    assert messages["a"].keys.tolist() == [0, 2] * 16
    assert messages["b"].tokens.dtype == np.int32 and messages["b"].keys.dtype == np.int64
    h.read(messages)
    for stream in streams:
        assert stream.tokens == h.expected(stream)[0][:17]
    h.run()
    h.check()


def test_tokens_and_ends_come_together(harness: Make) -> None:
    h = harness(steps_in_flight=1, **FAST)
    h.add(4, 3)
    h.add(4, 30)
    h.step()
    (message,) = h.engine.step().values()
    assert message.keys.tolist() == [0, 1, 0, *[1] * 15]
    assert [(ended.key, ended.finish_reason) for ended in message.ended] == [(0, "length")]
    h.read({"a": message})
    h.run()
    h.check()


@pytest.mark.parametrize("moment", range(1, 6))
def test_late_tokens_of_an_aborted_request_are_dropped(harness: Make, moment: int) -> None:
    """Its slot and pages are somebody else's by then."""
    h = harness(steps_in_flight=2, max_decoding_batch=2, num_pages=24, max_model_len=60, **FAST)
    victim, other = h.add(9, 50), h.add(9, 50)
    for _ in range(moment):
        h.step()
    assert victim.open
    got = len(victim.tokens)
    h.abort(victim)
    h.add(9, 20)
    h.run()
    h.check()
    assert len(victim.tokens) == got and len(other.tokens) == 50


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_of_a_lease_are_reserved(harness: Make, page_size: int) -> None:
    """The executor asserts it; here: no more than its steps take."""
    h = harness(page_size=page_size, num_pages=90, steps_in_flight=1, **FAST)
    h.add(5, 60)
    for _ in range(2):
        h.step()
    assert h.executor.log[-1].num_steps == 16
    assert h.executor.log[-1].kv_page_len.tolist() == [-(-(5 + 16) // page_size)]
    h.run()
    h.check()


def test_a_lease_preempts_nobody(harness: Make, scheduler: str, steps_in_flight: int) -> None:
    """Out of pages it is 1, and then it holds no more pages than before."""
    h = harness(
        scheduler=scheduler,
        steps_in_flight=steps_in_flight,
        page_size=1,
        num_pages=64,
        max_model_len=60,
        **FAST,
    )
    grants = _watch(h)
    for _ in range(4):
        h.add(8, 40)
    h.run()
    h.check()
    assert h.engine.stats().preemptions > 0
    assert any(grant.num_steps == 1 and not grant.waiting for grant in grants)
    assert any(grant.num_steps > 1 for grant in grants)


def test_leases_do_not_add_preemptions(harness: Make) -> None:
    def preemptions(num_steps: int) -> int:
        h = harness(
            page_size=1, num_pages=64, max_model_len=60, max_lease=num_steps, steps_in_flight=1
        )
        h.executor.step_seconds = 0.0001
        for _ in range(4):
            h.add(8, 22)
        h.run()
        h.check()
        return int(h.engine.stats().preemptions)

    assert preemptions(16) <= preemptions(1) + 1


@pytest.mark.parametrize("index", [1, 2, 9, 17, 18])
def test_row_that_fails_in_the_middle(harness: Make, steps_in_flight: int, index: int) -> None:
    """It ends alone, after the tokens that were good, as if each step were a call."""
    h = harness(steps_in_flight=steps_in_flight, **FAST)
    h.executor.errors = {(1, index)}
    streams = [h.add(4, 30) for _ in range(3)]
    h.run()
    h.check()
    assert [len(stream.tokens) for stream in streams] == [30, index, 30]
    assert streams[1].ended.finish_reason == "error"


def test_crash_in_a_lease_loses_and_repeats_nothing(harness: Make, steps_in_flight: int) -> None:
    for crash in range(5):
        h = harness(steps_in_flight=steps_in_flight, **FAST)
        h.executor.fail_at = {crash}
        for length in (3, 9):
            h.add(length, 50)
        h.run()
        h.check()
        assert h.executor.epoch == 1


def test_step_that_takes_long_ends_the_leases(harness: Make) -> None:
    """The machine gets slow: calls come back about as often as before."""
    h = harness(steps_in_flight=1, max_model_len=400, num_pages=120, **FAST)
    h.add(5, 300)
    for _ in range(4):
        h.step()
    h.executor.step_seconds = 0.02
    for _ in range(6):
        h.step()
    assert _leases(h)[3] == 16 and _leases(h)[-1] == 1
    h.run()
    h.check()
