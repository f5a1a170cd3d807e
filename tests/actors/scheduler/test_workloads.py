"""Random workloads: whatever the limits, evictions, aborts and crashes, each stream is exact."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow(reason="hundreds of random workloads")

FUNCTION_FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
MODEL_LEN = 70
WISHES = ("stop", "eos", "priority", "client", "extra_keys")
FAST = {"max_lease": 16, "step_seconds": 0.0002}
ALIKE = [*range(50), *range(10)]


@st.composite
def _limits(draw: st.DrawFn) -> dict[str, Any]:
    page_size = draw(st.integers(1, 8))
    rows = draw(st.integers(1, 8))
    pages_of_one = -(-MODEL_LEN // page_size)
    return {
        "page_size": page_size,
        "num_pages": pages_of_one + draw(st.integers(0, pages_of_one)),
        "max_model_len": MODEL_LEN,
        "max_decoding_batch": rows,
        "max_batch_tokens": draw(st.integers(rows, 64)),
        "max_prefill_batch": draw(st.integers(1, 4)),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "vocab_size": draw(st.sampled_from([5, 50])),
        "prefix_caching": draw(st.booleans()),
        "max_lease": draw(st.sampled_from([1, 7, 16])),
        "num_host_pages": draw(st.sampled_from([0, 3, 300])),
        "step_seconds": draw(st.sampled_from([0.0, 0.0002, 0.001])),
    }


@st.composite
def _request(draw: st.DrawFn) -> dict[str, Any]:
    tokens = st.integers(0, 49)
    return {
        "at": draw(st.integers(0, 15)),
        "abort_at": draw(st.none() | st.integers(0, 40)),
        "prompt": draw(st.integers(1, 60) | st.integers(1, 60).map(lambda n: ALIKE[:n])),
        "max_tokens": draw(st.integers(1, 10)),
        "stop": draw(st.sets(tokens, max_size=2) | st.sets(tokens, min_size=9, max_size=12)),
        "eos": draw(st.sets(tokens, max_size=1)),
        "priority": draw(st.integers(0, 2)),
        "client": draw(st.sampled_from("ab")),
        "extra_keys": draw(st.sampled_from([(), (), ("salt",)])),
    }


def _play(h: Any, requests: list[dict[str, Any]]) -> None:
    aborts: dict[int, list[Any]] = {}
    for now in range(45):
        for wish in [r for r in requests if r["at"] == now]:
            wanted = {name: wish[name] for name in WISHES}
            stream = h.add(wish["prompt"], wish["max_tokens"], **wanted)
            if wish["abort_at"] is not None:
                aborts.setdefault(max(now, wish["abort_at"]), []).append(stream)
        for stream in aborts.pop(now, []):
            h.abort(stream)
        h.step()
    h.run()


@given(
    limits=_limits(),
    requests=st.lists(_request(), min_size=1, max_size=12),
    crashes=st.sets(st.integers(0, 30), max_size=2),
    crashed_submits=st.sets(st.integers(0, 30), max_size=1),
    errors=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=2),
)
@settings(max_examples=250, suppress_health_check=FUNCTION_FIXTURES)
def test_streams_are_exact(
    harness: Callable[..., Any],
    scheduler: str,
    steps_in_flight: int,
    limits: dict[str, Any],
    requests: list[dict[str, Any]],
    crashes: set[int],
    crashed_submits: set[int],
    errors: set[tuple[int, int]],
) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight, **limits)
    h.executor.fail_at = crashes
    h.executor.fail_submit_at = crashed_submits
    h.executor.errors = errors
    _play(h, requests)
    h.check()
    event(f"preempted: {h.engine.lifecycle.state.counters.preemptions > 0}")
    event(f"swapped: {h.engine.stats().swapped_in > 0}")
    event(f"shared: {h.engine.stats().prefix_hits > 0}")
    event(f"leased: {any(step.num_steps > 1 for step in h.executor.log)}")
    event(f"restarted: {h.executor.epoch > 0}")


@pytest.mark.parametrize("budget", [3, 5, 16, 64])
def test_chunk_budgets_do_not_change_tokens(
    harness: Callable[..., Any], steps_in_flight: int, budget: int
) -> None:
    h = harness(max_batch_tokens=budget, max_decoding_batch=3, steps_in_flight=steps_in_flight)
    for length in (1, 3, 4, 5, 8, 16, 17, 60):
        h.add(length, 9)
    h.run()
    h.check()


def test_tiny_pool_preempts_and_loses_nothing(
    harness: Callable[..., Any], scheduler: str, steps_in_flight: int
) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight, num_pages=20, page_size=4)
    for _ in range(12):
        h.add(12, 30)
    h.run()
    h.check()
    assert h.engine.stats().preemptions > 0


@given(seed=st.integers(0, 2**16), cut=st.integers(0, 9), prompt=st.integers(1, 30))
@settings(max_examples=30, suppress_health_check=FUNCTION_FIXTURES)
def test_resubmission_goes_on_where_it_broke_off(
    harness: Callable[..., Any], seed: int, cut: int, prompt: int
) -> None:
    """A request that comes back with the tokens already delivered gets only the others."""
    first = harness()
    for _ in range(seed % 3):
        first.add(3)
    whole = first.add(prompt, 10)
    first.run()
    second = harness()
    for _ in range(seed % 3):
        second.add(3)
    rest = second.add(whole.source.prompt.tolist(), 10, output=whole.tokens[:cut])
    second.run()
    second.check()
    assert rest.tokens == whole.tokens
    assert [seed for seed, _ in second.history].count(rest.seed) == 10 - cut


@pytest.mark.parametrize("speed", [{}, FAST])
def test_every_crash_point(
    harness: Callable[..., Any], scheduler: str, speed: dict[str, Any]
) -> None:
    """The group dies once, at each step of a run in turn."""
    for crash in range(100):
        h = harness(
            scheduler=scheduler, num_pages=24, max_batch_tokens=8, max_decoding_batch=4, **speed
        )
        h.executor.fail_at = {crash}
        for length in (5, 1, 8, 20):
            h.add(ALIKE[:length], 8)
        h.run()
        h.check()
        if h.executor.epoch == 0:  # it was done before
            break
        assert h.executor.epoch == 1
    assert 3 <= crash < 99


@pytest.mark.parametrize("speed", [{}, FAST])
def test_every_abort_point(
    harness: Callable[..., Any], scheduler: str, speed: dict[str, Any]
) -> None:
    """One request is aborted after each number of steps in turn; its slot is used again."""
    for moment in range(16):
        h = harness(scheduler=scheduler, max_decoding_batch=2, max_batch_tokens=6, **speed)
        victim = h.add(ALIKE[:9], 6)
        h.add(3, 6)
        for _ in range(moment):
            h.step()
        h.abort(victim)
        h.add(ALIKE[:9], 6)
        h.run()
        h.check()
