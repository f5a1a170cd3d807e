"""The scheduler as a state machine: any order of arrivals, aborts, steps, deaths and deadlines.

The harness and the fake runner hold each step against the contract: I8 limits, I9 and I10 order of
admission, I11 exact streams whatever is preempted, I14 deadlines. Here the queue's books are held
against a count by hand after every rule, and I13 in the end: whatever was taken in gets done.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fake_stream import Stream
from harness import Harness, make_harness
from rayfin.actors.errors import Overloaded
from rayfin.actors.scheduler.queues.fair_queue import FairQueue

pytestmark = pytest.mark.slow(reason="long random histories")

MODEL_LEN = 24


class SchedulerMachine(RuleBasedStateMachine):
    """One engine of random limits on a virtual clock."""

    h: Harness

    @initialize(
        scheduler=st.sampled_from(["v1", "v1", "v0"]),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        aging=st.sampled_from([0.0, 0.5, 2.0]),
        threshold=st.sampled_from([0, 3]),
        max_tokens=st.sampled_from([None, 40]),
        steps_in_flight=st.integers(1, 2),
        rows=st.integers(1, 4),
        spare_pages=st.integers(0, 6),
        max_lease=st.sampled_from([1, 5]),
        host_pages=st.sampled_from([0, 6]),
    )
    def start(
        self,
        scheduler: str,
        policy: str,
        aging: float,
        threshold: int,
        max_tokens: int | None,
        steps_in_flight: int,
        rows: int,
        spare_pages: int,
        max_lease: int,
        host_pages: int,
    ) -> None:
        self.h = make_harness(
            scheduler=scheduler,
            policy=policy,
            priority_aging=aging,
            tenant_weights={"a": 2.0},
            long_prefill_token_threshold=0 if scheduler == "v0" else threshold,
            max_waiting_tokens=max_tokens,
            max_waiting_requests=5,
            steps_in_flight=steps_in_flight,
            max_decoding_batch=rows,
            max_batch_tokens=16,
            max_model_len=MODEL_LEN,
            num_pages=MODEL_LEN // 4 + spare_pages,
            max_lease=max_lease,
            num_host_pages=host_pages,
            step_seconds=0.001,
        )

    @rule(
        prompt=st.integers(1, 12),
        output=st.integers(1, 12),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("abc"),
        timeout=st.sampled_from([None, None, 0.002, 0.02, 1.0]),
        client=st.sampled_from("ab"),
    )
    def add(self, prompt: int, output: int, **wishes: Any) -> None:
        books = self.h.engine.lifecycle.state.queue_limits
        most = self.h.config.max_waiting_tokens
        full = books.num_requests >= self.h.config.max_waiting_requests or (
            most is not None and books.num_requests > 0 and books.num_tokens + prompt > most
        )
        try:
            self.h.add(prompt, output, **wishes)
            assert not full
        except Overloaded:
            assert full

    @rule(tenant=st.sampled_from("ab"), count=st.integers(2, 5))
    def flood(self, tenant: str, count: int) -> None:
        """Short prompts with long outputs: pages run out."""
        for _ in range(count):
            self.add(2, MODEL_LEN - 2, priority=1, tenant=tenant, timeout=None, client="a")

    def _open(self) -> list[Stream]:
        return [stream for stream in self.h.streams.values() if stream.open]

    @precondition(lambda self: self._open())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.h.abort(data.draw(st.sampled_from(self._open())))

    @rule(client=st.sampled_from("ab"))
    def lose_client(self, client: str) -> None:
        self.h.engine.abort_client(client)
        for stream in self._open():
            stream.aborted = stream.source.client == client

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.h.step()

    @rule(seconds=st.sampled_from([0.001, 0.02, 1.5]))
    def wait(self, seconds: float) -> None:
        self.h.executor.clock += seconds

    @precondition(lambda self: self.h.executor.num_run - 1 not in self.h.executor.fail_at)
    @rule()
    def kill_runner(self) -> None:
        self.h.executor.fail_at.add(self.h.executor.num_run)

    @precondition(lambda self: self._open())
    @rule(data=st.data(), ahead=st.integers(0, 3))
    def fail_row(self, data: st.DataObject, ahead: int) -> None:
        """A token of one request that is not sampled yet, steps in flight included, will fail."""
        stream = data.draw(st.sampled_from(self._open()))
        if not any(seed == stream.seed for seed, _ in self.h.executor.errors):
            index = len(stream.tokens) + 2 * self.h.config.max_lease + ahead
            self.h.executor.errors.add((stream.seed, index))

    @invariant()
    def books_agree(self) -> None:
        engine = self.h.engine
        engine.check_integrity()
        live, lifecycle = list(engine.lifecycle.state.live.values()), engine.lifecycle
        new = [request for request in live if not request.admitted]
        assert lifecycle.state.queue_limits.num_requests == len(new)
        assert lifecycle.state.queue_limits.num_tokens == sum(len(r.source.prompt) for r in new)
        assert len(lifecycle.state.waiting) == sum(request.slot is None for request in live)
        assert len(lifecycle.state.running) == sum(len(request.slots) for request in live)
        assert len(engine._endings.deadlines) == sum(r.source.timeout is not None for r in live)
        assert {
            (s.source.client, s.source.key) for s in self._open()
        } == engine.lifecycle.state.live.keys()
        if isinstance(lifecycle.state.waiting.foreground, FairQueue):
            assert lifecycle.state.waiting.foreground.num_tenants <= 3

    def teardown(self) -> None:
        if hasattr(self, "h"):
            self.h.run()  # I13
            self.h.check()


def test_any_order_of_things() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(max_examples=120, stateful_step_count=40),
    )
