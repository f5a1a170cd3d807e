"""The Virtual Token Counter: shares, lifts, what is charged, what is remembered."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rayfin.actors.messages import EngineRequest, Sampling, StopRules
from rayfin.actors.scheduler.queues import fair_queue
from rayfin.actors.scheduler.queues.fair_queue import (
    CACHED_WEIGHT,
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    FairQueue,
)
from rayfin.actors.scheduler.request import Request
from rayfin.cache.prefix_index import HashChain

Make = Callable[..., Any]
SLOTS = 4


class _Queue(FairQueue):
    """The queue with requests made on the fly."""

    def __init__(self, **weights: float) -> None:
        super().__init__(SLOTS, weights)
        self.num_made = 0
        self.running: dict[int, Request] = {}

    def join(self, tenant: str, prompt_len: int = 1) -> Request:
        prompt = np.zeros(prompt_len, np.int32)
        source = EngineRequest("", prompt, Sampling(), StopRules(9), tenant=tenant)
        request = Request(source, self.num_made, 0.0, HashChain(4))
        self.num_made += 1
        self.push(request)
        return request

    def admit(self, slot: int) -> Request:
        request = self.pop()
        request.slots = [slot]
        self.entered(request)
        request.admitted_at = 0.0
        self.running[slot] = request
        return request

    def leave(self, slot: int) -> Request:
        request = self.running.pop(slot)
        self.left(request)
        request.slots = []
        return request

    def serve(self, slot: int, tokens: int) -> None:
        for _ in range(tokens):
            self.sampled(np.array([slot]))

    def order(self, count: int) -> str:
        """Who is served next, and next: one letter each, of requests that take no output."""
        names = []
        for _ in range(count):
            names.append(self.admit(SLOTS - 1).source.tenant)
            self.leave(SLOTS - 1)
        return "".join(names)


def test_tenants_take_turns_whoever_asks_for_more() -> None:
    queue = _Queue()
    for _ in range(6):
        queue.join("a")
    for _ in range(3):
        queue.join("b")
    assert queue.order(9) == "ababab" + "aaa"
    assert len(queue) == 0 and queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_weights_are_shares() -> None:
    queue = _Queue(a=3.0)
    for _ in range(30):
        queue.join("a", 6)
        queue.join("b", 6)
    assert queue.order(24).count("a") == 18


def test_long_prompts_count_for_what_they_are() -> None:
    queue = _Queue()
    for _ in range(20):
        queue.join("a", 10)
        queue.join("b", 2)
    assert queue.order(24).count("b") == 20


def test_what_is_cached_costs_a_tenth() -> None:
    """A session's long context is little work: it is charged for what it adds."""
    queue = _Queue()
    request = queue.join("a", 100)
    request.cached_tokens = 90
    assert queue.counter("a") == 0
    queue.admit(0)
    assert queue.counter("a") == 10 * PROMPT_WEIGHT + 90 * CACHED_WEIGHT


def test_output_is_charged_as_it_is_sampled() -> None:
    queue = _Queue()
    for tenant in "abab":
        queue.join(tenant)
    queue.admit(0), queue.admit(1)
    queue.serve(0, 5)
    queue.serve(1, 6)
    queue.sampled(np.array([0, 1]))
    assert queue.counter("a") == PROMPT_WEIGHT + 6 * OUTPUT_WEIGHT
    assert queue.counter("b") == PROMPT_WEIGHT + 7 * OUTPUT_WEIGHT
    assert queue.order(2) == "ab"
    queue.leave(0)
    queue.leave(1)


def test_idling_earns_no_credit() -> None:
    queue = _Queue()
    for _ in range(20):
        queue.join("a")
    queue.order(10)
    for _ in range(10):
        queue.join("b")
    assert queue.order(6) == "ababab"


def test_what_a_tenant_had_is_not_forgotten_by_a_pause() -> None:
    """No other tenant waited, so it comes back with its counter, as in the paper."""
    queue = _Queue()
    queue.join("a", 10)
    queue.join("b", 1)
    queue.join("b", 1)
    assert queue.order(2) == "ab"
    queue.join("a", 1)
    for _ in range(12):
        queue.join("b", 1)
    assert queue.order(10) == "bbbbbbbbba"


def test_after_a_pause_of_all_the_last_to_wait_is_the_measure() -> None:
    queue = _Queue()
    for _ in range(5):
        queue.join("a", 7)
    queue.order(5)
    queue.join("b")
    assert queue.counter("b") == 35.0


def test_preempted_request_waits_in_front_and_is_not_charged_again() -> None:
    queue = _Queue()
    first = queue.join("a", 5)
    queue.join("a", 5)
    assert queue.admit(2) is first
    queue.serve(2, 3)
    queue.leave(2)
    queue.push(first)
    before = queue.counter("a")
    assert queue.admit(1) is first
    assert queue.counter("a") == before == 5 * PROMPT_WEIGHT + 3 * OUTPUT_WEIGHT


def test_victim_is_the_latest_of_whom_was_served_most() -> None:
    queue = _Queue(b=10.0)
    for tenant in "aabb":
        queue.join(tenant, 2)
    running = [queue.admit(slot) for slot in range(4)]
    queue.serve(0, 3)
    victim = queue.victim(running)
    assert victim.source.tenant == "a"
    assert victim.order == max(r.order for r in running if r.source.tenant == "a")


def test_discard() -> None:
    queue = _Queue()
    gone, stays = queue.join("a"), queue.join("b")
    queue.discard(gone)
    assert len(queue) == 1 and queue.peek() is stays
    queue.discard(stays)
    assert len(queue) == 0 and queue.peek() is None


def test_idle_tenants_cost_nothing() -> None:
    queue = _Queue()
    for number in range(50_000):
        name = f"tenant {number}"
        if number % 3:
            queue.discard(queue.join(name))
        else:
            queue.join(name)
            queue.admit(0)
            queue.serve(0, 1)
            queue.leave(0)
    assert queue.num_tenants <= 2


def test_tenants_that_are_ahead_are_remembered_up_to_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those least ahead of the others are forgotten first."""
    monkeypatch.setattr(fair_queue, "MAX_IDLE", 10)
    queue = _Queue()
    queue.join("behind", 1)
    for number in range(30):
        queue.join(f"t{number}", 1)
    queue.join("behind")
    for number in range(31):
        queue.admit(0)
        queue.serve(0, number)
        queue.leave(0)
    assert queue.num_tenants <= 12
    assert queue.counter("t29") > 0 and queue.counter("t1") == 0


def _weighed(h: Any, tenant: str, requests: list[Request]) -> float:
    """What the tenant was served, by the streams alone."""
    own = [request for request in requests if request.source.tenant == tenant]
    begun = [request for request in own if request.admitted_at is not None]
    cached = sum(request.cached_tokens for request in begun)
    prompts = sum(len(request.source.prompt) for request in begun) - (1 - CACHED_WEIGHT) * cached
    outputs = sum(len(h.streams["a", r.source.key].tokens) for r in own)
    return PROMPT_WEIGHT * prompts + OUTPUT_WEIGHT * outputs


MOST_PROMPT, MOST_OUTPUT, ROWS = 20, 8, 3


def _play(h: Any, draw: Callable[[str], tuple[int, int]], steps: int) -> list[dict[str, float]]:
    """Keeps tenants x and y backlogged; returns their weighed service after each step."""
    requests: list[Request] = []
    service: list[dict[str, float]] = []
    for _ in range(steps):
        for tenant in "xy":
            waiting = [r for r in requests if r.source.tenant == tenant and r.slot is None]
            open_ones = sum(h.streams["a", r.source.key].open for r in waiting)
            for _ in range(2 * ROWS + 1 - open_ones):  # more than two schedules can admit
                stream = h.add(*draw(tenant), tenant=tenant)
                requests.append(h.engine.lifecycle.state.live["a", stream.seed])
        h.step()
        service.append({tenant: _weighed(h, tenant, requests) for tenant in "xy"})
    return service


def _bound(weight: float) -> float:
    """How far ahead a tenant can get of another that waits: it was admitted last with the lesser
    counter, and since then got that prompt and what its running requests had left to say.

    The paper's max(w_p L_input, w_q M), where M counts the prompt too: a preempted request is not
    charged for it again, so here the two add up.
    """
    return (PROMPT_WEIGHT * MOST_PROMPT + OUTPUT_WEIGHT * ROWS * MOST_OUTPUT) / weight


@given(
    data=st.data(),
    x=st.sampled_from([0.3, 1.0, 4.0]),
    y=st.sampled_from([1.0, 2.0]),
    steps_in_flight=st.integers(1, 2),
    num_pages=st.sampled_from([8, 11, 64]),
    max_lease=st.sampled_from([1, 7]),
    threshold=st.sampled_from([0, 3]),
    crash=st.none() | st.integers(5, 60),
)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_backlogged_tenants_are_served_alike(
    harness: Make,
    data: st.DataObject,
    x: float,
    y: float,
    steps_in_flight: int,
    num_pages: int,
    max_lease: int,
    threshold: int,
    crash: int | None,
) -> None:
    """I12: |W_x / x - W_y / y| stays under a bound that does not grow with time."""
    h = harness(
        policy="fair",
        tenant_weights={"x": x, "y": y},
        sessions=False,  # turns without a seat wait beside the queue, by pages
        steps_in_flight=steps_in_flight,
        num_pages=num_pages,
        max_model_len=MOST_PROMPT + MOST_OUTPUT,
        max_decoding_batch=ROWS,
        max_lease=max_lease,
        long_prefill_token_threshold=threshold,
        step_seconds=0.0002,
    )
    if crash is not None:
        h.executor.fail_at = {crash}
    sizes = st.tuples(st.integers(1, MOST_PROMPT), st.integers(1, MOST_OUTPUT))
    kinds = {tenant: data.draw(st.lists(sizes, min_size=1, max_size=5)) for tenant in "xy"}
    count = {"x": 0, "y": 0}

    def draw(tenant: str) -> tuple[int, int]:
        count[tenant] += 1
        return kinds[tenant][count[tenant] % len(kinds[tenant])]

    service = _play(h, draw, 150)
    queue = h.engine.lifecycle.state.waiting.foreground
    for tenant, weight in (("x", x), ("y", y)):
        assert queue.counter(tenant) == pytest.approx(service[-1][tenant] / weight)
    bound = max(_bound(x), _bound(y))
    assert all(abs(now["x"] / x - now["y"] / y) <= bound for now in service)
    event(f"preempted: {h.engine.stats().preemptions > 0}")
    h.run()
    h.check()


def test_first_come_first_served_is_not_fair(harness: Make) -> None:
    """The bound above says something: a tenant of long requests gets past it without a policy."""
    apart = {}
    for policy in ("fcfs", "fair"):
        h = harness(policy=policy, max_decoding_batch=ROWS, max_model_len=28)
        service = _play(h, lambda tenant: (20, 8) if tenant == "x" else (1, 1), 300)
        apart[policy] = max(abs(now["x"] - now["y"]) for now in service)
        h.run()
    assert apart["fair"] <= _bound(1.0) < apart["fcfs"]
