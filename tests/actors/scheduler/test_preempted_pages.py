"""Preempted requests with pages in host memory go on exactly, and leave nothing behind."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rayfin.actors.messages import SWAP_IN, SWAP_OUT
from rayfin.cache.errors import CacheError

Make = Callable[..., Any]
SMALL = {"num_pages": 4, "max_model_len": 16, "steps_in_flight": 1}


def _prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 5 * i + i * i // 3) % 50 for i in range(length)]


def _two_at_the_edge(h: Any) -> tuple[Any, Any]:
    """Two requests that outgrow a pool of 4 pages of 4 tokens together, each fits alone."""
    return h.add(7, 8), h.add(7, 8)


def _moves(h: Any) -> list[list[int]]:
    return [move for step in h.executor.log for move in step.moves.tolist()]


def _kinds(h: Any, kind: int) -> int:
    return sum(move[0] == kind for move in _moves(h))


def _preempt(h: Any, stream: Any) -> None:
    """As if pages had run out just now, and this request had to give up its own."""
    lifecycle = h.engine.lifecycle
    slots = [
        s
        for s in lifecycle.state.running.slots()
        if lifecycle.state.running.key[s] == stream.source.key
    ]
    for slot in slots:
        lifecycle.preempt(slot)
    h.engine.check_integrity()


@pytest.mark.parametrize("caching", [True, False])
def test_tokens_come_back_from_host_memory(harness: Make, scheduler: str, caching: bool) -> None:
    """Out with all of its pages; back with those the prefix index does not know (any more)."""
    h = harness(scheduler=scheduler, num_host_pages=4, prefix_caching=caching, **SMALL)
    old, new = _two_at_the_edge(h)
    h.run()
    h.check()
    stats = h.engine.stats()
    assert (stats.preemptions, stats.preemptions_by_swap, stats.swapped_out) == (1, 1, 2)
    assert h.executor.entered == [old.seed, new.seed, new.seed]
    again = [step for step in h.executor.log if step.prefill_batch][-1]
    assert again.chunk_len[-1] == 1  # all but its last known token were kept
    assert stats.swapped_in == _kinds(h, SWAP_IN) == len(again.moves) >= 1
    assert stats.host_pages_total == 4 and stats.host_pages_held == 0


def test_pages_go_out_and_come_back_in_order(harness: Make) -> None:
    h = harness(num_host_pages=4, prefix_caching=False, **SMALL)
    _two_at_the_edge(h)
    h.run()
    h.check()
    assert _moves(h) == [[SWAP_OUT, 2, 0], [SWAP_OUT, 3, 1], [SWAP_IN, 0, 0], [SWAP_IN, 1, 1]]
    out = next(step for step in h.executor.log if len(step.moves))
    assert out.finished == [1] and set(out.new_pages.tolist()) & {2, 3}  # rewritten right away


@pytest.mark.parametrize("host_pages, swaps", [(0, 0), (1, 0), (2, 1)])
def test_without_host_room_it_is_recomputed(harness: Make, host_pages: int, swaps: int) -> None:
    """All of its pages or none: a part would leave the rest to compute anyway."""
    h = harness(num_host_pages=host_pages, prefix_caching=False, **SMALL)
    _two_at_the_edge(h)
    h.run()
    h.check()
    assert h.engine.stats().preemptions == 1
    assert h.engine.stats().preemptions_by_swap == swaps
    again = [step for step in h.executor.log if step.prefill_batch][-1]
    assert again.kv_len[-1] == (8 if swaps else 0)


def test_kept_tokens_end_within_a_page(harness: Make) -> None:
    """Only known tokens but the last count, whatever the steps in flight have written."""
    h = harness(num_host_pages=8, prefix_caching=False)
    stream = h.add(9, 12)
    while len(stream.tokens) < 3:
        h.step()
    _preempt(h, stream)
    h.run()
    h.check()
    again = [step for step in h.executor.log if step.prefill_batch][-1]
    assert again.kv_len.tolist() == [9 + 3 - 1] and again.chunk_len.tolist() == [1]
    assert h.engine.stats().swapped_out == 3


def test_found_pages_are_not_swapped_in(harness: Make) -> None:
    """The prefix index goes first: only the page that is not full comes from the host."""
    h = harness(num_host_pages=8)
    stream = h.add(9, 12)
    while len(stream.tokens) < 3:
        h.step()
    _preempt(h, stream)
    h.run()
    h.check()
    assert (h.engine.stats().swapped_out, h.engine.stats().swapped_in) == (3, 1)


def test_prefix_that_covers_everything_needs_no_swap(harness: Make) -> None:
    h = harness(num_host_pages=8, steps_in_flight=1)
    stream = h.add(8, 12)
    h.step()
    _preempt(h, stream)  # 8 tokens of 9 known are computed: two full pages
    h.run()
    h.check()
    assert (h.engine.stats().swapped_out, h.engine.stats().swapped_in) == (2, 0)


def test_others_find_what_was_swapped_in(harness: Make, scheduler: str) -> None:
    """Even in the same step: moves are made before all rows."""
    h = harness(scheduler=scheduler, num_host_pages=40, num_pages=20, max_model_len=76)
    first = h.add(_prompt(17), 12)
    h.step()
    _preempt(h, first)
    h.engine.lifecycle.state.tables.reset_prefix_cache()  # as if its pages were reused
    second = h.add(_prompt(17), 4)
    h.run()
    h.check()
    assert h.engine.stats().swapped_in == 5 and second.ended.cached_tokens == 16
    step = next(step for step in h.executor.log if SWAP_IN in step.moves[:, 0])
    assert {new.sampling.seed for new in step.new_requests} == {first.seed, second.seed}


def test_swap_out_waits_for_a_step_with_rows(harness: Make) -> None:
    """One request is at its cap, its last token on the way; the other one gives up its own pages.

    Nothing is left to run, so the moves wait; they go with the step that takes the pages again.
    """
    h = harness(num_host_pages=4, num_pages=5, max_model_len=16, prefix_caching=False)
    h.add(6, 5)
    new = h.add(4, 8)
    lifecycle = h.engine.lifecycle
    waited = 0
    while h.engine.has_work:
        h.step()
        waited += len(lifecycle.state.moves)
    h.check()
    assert waited == 2
    step = next(step for step in h.executor.log if len(step.moves))
    assert step.moves[:, 0].tolist() == [SWAP_OUT, SWAP_OUT, SWAP_IN, SWAP_IN]
    assert step.moves[2:, 2].tolist() == [0, 1]  # of the request that has just ended
    assert step.finished == [1, 0] and step.new_requests[0].sampling.seed == new.seed


def test_restart_drops_moves_that_wait(harness: Make) -> None:
    """The same, but the step with that last token never ends: the pages to move are gone."""
    h = harness(num_host_pages=4, num_pages=5, max_model_len=16, prefix_caching=False)
    h.add(6, 5)
    h.add(4, 8)
    h.executor.fail_at = {4}
    h.run()
    h.check()
    stats = h.engine.stats()
    assert (stats.preemptions_by_swap, stats.requeued_by_restart, stats.epoch) == (1, 1, 1)


@pytest.mark.parametrize("wait", [0, 1, 3])
def test_abort_of_a_swapped_request(harness: Make, steps_in_flight: int, wait: int) -> None:
    """Its host pages are free at once, also when the move to them is still to be made."""
    h = harness(num_host_pages=4, num_pages=12, max_model_len=40, steps_in_flight=steps_in_flight)
    stream, other = h.add(9, 12), h.add(6, 14)
    blocker = h.add(20, 2)
    for _ in range(3):
        h.step()
    _preempt(h, stream)
    assert h.engine.stats().host_pages_held == 3
    h.engine.lifecycle.state.running._free, slots = [], h.engine.lifecycle.state.running._free
    for _ in range(wait):
        h.step()
    h.engine.lifecycle.state.running._free += slots
    h.abort(stream)
    assert h.engine.stats().host_pages_held == 0
    _preempt(h, other)  # takes the same host pages
    h.run()
    h.check()
    assert blocker.ended is not None


def test_restart_forgets_host_memory(harness: Make, scheduler: str) -> None:
    """What was kept there died with the runner: everything is computed again."""
    h = harness(scheduler=scheduler, num_host_pages=4, prefix_caching=False, **SMALL)
    _two_at_the_edge(h)
    while not h.engine.stats().host_pages_held:
        h.step()
    h.executor.fail_at = {h.executor.num_run + 1}
    while not h.executor.epoch:
        h.step()
    assert h.engine.stats().host_pages_held == 0
    h.run()
    h.check()
    stats = h.engine.stats()
    assert stats.requeued_by_restart >= 1 and stats.epoch == 1
    epoch_1 = [step for step in h.executor.log if step.epoch == 1]
    assert epoch_1[0].kv_len.tolist() == [0] * len(epoch_1[0].ids)


def test_restart_is_no_preemption(harness: Make) -> None:
    h = harness(num_host_pages=4)
    h.add(9, 5)
    h.executor.fail_at = {2}
    h.run()
    h.check()
    stats = h.engine.stats()
    assert (stats.preemptions, stats.swapped_out, stats.requeued_by_restart) == (0, 0, 1)


def test_row_that_fails_while_its_pages_go_out(harness: Make) -> None:
    """Its failure is dropped with the step in flight, and found again later."""
    h = harness(num_host_pages=8, steps_in_flight=2)
    stream = h.add(6, 10)
    h.executor.errors = {(stream.seed, 3)}
    while len(stream.tokens) < 3:
        h.step()
    _preempt(h, stream)
    h.run()
    h.check()
    assert stream.ended.finish_reason == "error" and h.engine.stats().preemptions_by_swap == 1


def test_prompt_that_is_scored_is_computed_again(harness: Make) -> None:
    """Log probabilities of chunks in flight are dropped, so they must be computed again."""
    h = harness(num_host_pages=8, max_batch_tokens=8, prefix_caching=False)
    stream = h.add(20, 4)
    stream.source.sampling = replace(stream.source.sampling, prompt_logprobs=0)
    h.step()
    _preempt(h, stream)
    assert h.engine.stats().preemptions_by_swap == 0
    h.run()
    assert [step.kv_len.tolist() for step in h.executor.log[2:4]] == [[0], [8]]


def test_admission_needs_as_many_pages_as_ever(harness: Make) -> None:
    """Host pages save arithmetic, not device pages: it waits until all of them are free."""
    h = harness(num_host_pages=8, num_pages=6, max_model_len=24, prefix_caching=False)
    old, new = h.add(9, 10), h.add(9, 10)
    h.run()
    h.check()
    assert h.engine.stats().preemptions_by_swap == 1
    back = next(step for step in h.executor.log if SWAP_IN in step.moves[:, 0])
    assert old.ended is not None and back.decoding_batch == 0
    assert new.ended is not None


def test_v0_brings_all_back_that_fit(harness: Make) -> None:
    """A prompt counts for what is left to compute of it: here one token each, four in a step."""
    h = harness(scheduler="v0", num_host_pages=40, num_pages=40, prefix_caching=False)
    streams = [h.add(30, 9) for _ in range(4)]
    for _ in range(8):
        h.step()
    for stream in streams:
        assert stream.open
        _preempt(h, stream)
    h.run()
    h.check()
    back = next(step for step in h.executor.log if SWAP_IN in step.moves[:, 0])
    assert back.chunk_len.tolist() == [1] * 4 and h.config.limits.max_batch_tokens < 120


SETTINGS = [
    {"max_lease": num_steps, "prefix_caching": caching, "num_host_pages": host}
    for num_steps, caching, host in itertools.product((1, 7), (True, False), (0, 5, 100))
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_preempted_at_any_step(
    harness: Make, scheduler: str, steps_in_flight: int, settings: dict[str, Any]
) -> None:
    """Once, or again and again, in the middle of its prompt or of a lease: tokens are the same."""
    swapped_out = 0
    for first, every in itertools.product(range(1, 14, 3), (2, 1000)):
        h = harness(
            scheduler=scheduler,
            steps_in_flight=steps_in_flight,
            max_batch_tokens=8,
            step_seconds=0.0002,
            max_model_len=48,
            **settings,
        )
        streams = h.add(_prompt(14), 12), h.add(5, 9)
        for step in range(1, 60):
            h.step()
            if step >= first and (step - first) % every == 0 and (step - first) // every < 4:
                for stream in streams:
                    _preempt(h, stream)
        h.run()
        h.check()
        swapped_out += h.engine.stats().swapped_out
    assert (swapped_out > 0) == (settings["num_host_pages"] > 0)


@pytest.mark.parametrize("host_pages", [2, 9, 60])
def test_flood_through_a_tiny_pool(harness: Make, scheduler: str, host_pages: int) -> None:
    """Many short prompts that grow; host pages are taken and given back all the time."""
    h = harness(
        scheduler=scheduler, num_pages=14, max_model_len=40, num_host_pages=host_pages, max_lease=7,
        step_seconds=0.0002,
    )  # fmt: skip
    for turn in range(40):
        h.add([*_prompt(1 + turn % 7), turn % 3], 9 + turn % 23)
        if turn % 4 == 0:
            h.step()
    h.run()
    h.check()
    stats = h.engine.stats()
    assert stats.preemptions > 10 and stats.swapped_in > 0
    assert (stats.preemptions_by_swap == stats.preemptions) == (host_pages == 60)


def _lose_a_page(swap: Any) -> None:
    swap._host.pool.allocate(1)


def _keep_it_running(swap: Any) -> None:
    next(iter(swap._saved)).slots.append(0)


def _keep_it_after_its_end(swap: Any) -> None:
    next(iter(swap._saved)).ended = True


def _keep_too_much(swap: Any) -> None:
    request = next(iter(swap._saved))
    request.output = request.output[:0]


def _keep_too_few_pages(swap: Any) -> None:
    swap._host.give_back([next(iter(swap._saved.values())).pages.pop()])


@pytest.mark.parametrize(
    "corrupt",
    [_lose_a_page, _keep_it_running, _keep_it_after_its_end, _keep_too_much, _keep_too_few_pages],
)
def test_check_integrity_finds(harness: Make, corrupt: Callable[[Any], None]) -> None:
    h = harness(num_host_pages=8)
    stream = h.add(9, 12)
    while len(stream.tokens) < 4:
        h.step()
    _preempt(h, stream)
    corrupt(h.engine.lifecycle.preemption)
    with pytest.raises(CacheError):
        h.engine.check_integrity()
