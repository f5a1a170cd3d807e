"""A scheduler that takes runners over knows what their pages hold, and computes nothing again."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fake_disk import fake_folder
from fake_stream import Stream
from harness import Harness, make_harness
from rayfin.actors.errors import RequestFailed
from rayfin.actors.messages import Command
from rayfin.cache.page_tables import PageTables
from rayfin.cache.prefix_index import PageName

Make = Callable[..., Any]
PROMPT = [(11 * i + i * i // 5) % 50 for i in range(21)]


def _computed(h: Any, since: int) -> int:
    """Tokens of steps, and not those that a lease or a decoding row samples."""
    return sum(info.num_prefill_tokens for info in h.executor.log[since:])


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("max_lease", [1, 5])
@pytest.mark.parametrize("drafts", [0, 3])
def test_streams_go_on(harness: Make, steps_in_flight: int, max_lease: int, drafts: int) -> None:
    h = harness(steps_in_flight=steps_in_flight, max_lease=max_lease, num_speculative_tokens=drafts)
    streams = [h.add([*PROMPT, number], 30) for number in range(4)]
    while min(len(stream.tokens) for stream in streams) < 15:
        h.step()
    since = len(h.executor.log)
    h.lose_scheduler()
    h.run()
    h.check()
    # A page and the tail of each: what its page that fills up and the one before it hold.
    assert _computed(h, since) <= 4 * 2 * 4


def test_the_next_turn_finds_the_answer(harness: Make) -> None:
    h = harness()
    stream = h.add(PROMPT, 12)
    h.run()
    h.lose_scheduler()
    turn = h.add([*PROMPT, *stream.tokens, 3, 4], 3)
    h.run()
    h.check()
    assert turn.ended.cached_tokens >= len(PROMPT) + 12 - 2 * 4


def test_two_deaths_without_a_step_between(harness: Make) -> None:
    h = harness()
    h.add(PROMPT, 4)
    h.run()
    h.lose_scheduler()
    h.lose_scheduler()
    stream = h.add(PROMPT, 4)
    h.run()
    h.check()
    assert stream.ended.cached_tokens == 20


def test_what_was_reset_is_forgotten(harness: Make) -> None:
    h = harness()
    h.add(PROMPT, 4)
    h.run()
    h.engine.carry_out(Command.RESET_CACHE)
    h.add(9, 2)
    h.run()
    h.lose_scheduler()
    stream = h.add(PROMPT, 4)
    h.run()
    h.check()
    assert stream.ended.cached_tokens == 0


def test_pages_of_a_row_that_failed_have_no_name(harness: Make) -> None:
    """Neither have those of steps that were sent before the scheduler learned of it."""
    h = harness(steps_in_flight=2, max_batch_tokens=12)
    h.executor.errors.add((0, 0))
    h.add(PROMPT, 4)
    h.run()
    h.lose_scheduler()
    stream = h.add(PROMPT, 4)
    h.run()
    h.check()
    assert stream.ended.cached_tokens <= 12


def test_the_end_of_a_prompt_is_reused_first() -> None:
    tables = PageTables(2, 6, 4, prefix_caching=True)
    tables.restore({page: PageName(bytes([page]) * 32, bytes(16)) for page in (4, 1, 3)})
    tables.check_integrity()
    assert tables.num_cached == 3
    assert [tables.pool.allocate(1) for _ in range(6)] == [[0], [2], [5], [3], [1], [4]]


class Deaths(RuleBasedStateMachine):
    """One engine whose scheduler, runners and rows die at any step; M1 holds behind each."""

    h: Harness

    @initialize(
        steps_in_flight=st.integers(1, 2),
        rows=st.integers(1, 4),
        spare_pages=st.integers(0, 12),
        max_lease=st.sampled_from([1, 5]),
        host_pages=st.sampled_from([0, 6]),
        drafts=st.sampled_from([0, 3]),
        disk=st.booleans(),
    )
    def start(
        self,
        steps_in_flight: int,
        rows: int,
        spare_pages: int,
        max_lease: int,
        host_pages: int,
        drafts: int,
        disk: bool,
    ) -> None:
        self.h = make_harness(
            steps_in_flight=steps_in_flight,
            max_decoding_batch=rows,
            max_batch_tokens=16,
            max_model_len=24,
            num_pages=6 + spare_pages,
            max_lease=max_lease,
            num_host_pages=host_pages,
            num_speculative_tokens=drafts,
            page_folder=fake_folder() if disk else None,
            page_bytes=1 << 20,
        )

    @rule(
        prompt=st.integers(1, 20),
        output=st.integers(1, 12),
        salt=st.sampled_from([(), (), ("salt",)]),
    )
    def add(self, prompt: int, output: int, salt: tuple[str, ...]) -> None:
        self.h.add(PROMPT[:prompt], min(output, 24 - prompt), extra_keys=salt)

    @rule()
    def go_on(self) -> None:
        """The next turn of a conversation."""
        for stream in list(self.h.streams.values()):
            prompt = [*stream.source.prompt.tolist(), *stream.tokens][:20]
            self.h.add(prompt, 4)
            return

    def _open(self) -> list[Stream]:
        return [stream for stream in self.h.streams.values() if stream.open]

    @precondition(lambda self: self._open())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.h.abort(data.draw(st.sampled_from(self._open())))

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.h.step()

    @precondition(lambda self: self._open())
    @rule(data=st.data(), ahead=st.integers(0, 3))
    def fail_row(self, data: st.DataObject, ahead: int) -> None:
        stream = data.draw(st.sampled_from(self._open()))
        if not any(seed == stream.seed for seed, _ in self.h.executor.errors):
            index = len(stream.tokens) + 2 * self.h.config.max_lease + ahead
            self.h.executor.errors.add((stream.seed, index))

    @rule()
    def reset(self) -> None:
        self.h.engine.carry_out(Command.RESET_CACHE)

    @precondition(lambda self: self.h.executor.num_run - 1 not in self.h.executor.fail_at)
    @rule()
    def kill_runner(self) -> None:
        self.h.executor.fail_at.add(self.h.executor.num_run)
        self.h.step()

    @precondition(lambda self: not self.h.executor.is_dead)
    @rule()
    def kill_scheduler(self) -> None:
        known = self.h.executor.names.all()
        self.h.lose_scheduler()
        index = self.h.engine.lifecycle.state.tables.index
        assert index is not None
        assert all(page in known for page in range(self.h.config.num_pages) if page in index)  # M7
        self.h.executor.check_names()

    def teardown(self) -> None:
        if hasattr(self, "h"):
            self.h.run()
            self.h.check()
            failed = [own.ended.error for own in self.h.streams.values() if own.ended is not None]
            assert all(error is None or isinstance(error, RequestFailed) for error in failed)


@pytest.mark.slow(reason="long random histories")
def test_any_order_of_deaths() -> None:
    run_state_machine_as_test(Deaths, settings=settings(max_examples=120, stateful_step_count=30))
