"""Requests that begin alike share pages, which does not change their tokens."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from rayfin.actors.messages import Pin

Make = Callable[..., Any]
FAST = {"max_lease": 16, "step_seconds": 0.0002}  # leases of 16 steps in steady decode


def _prompt(length: int) -> list[int]:
    return [(11 * i + i * i // 5) % 50 for i in range(length)]


@pytest.mark.parametrize(
    "length, cached", [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16), (18, 16)]
)
def test_same_prompt_again(harness: Make, scheduler: str, length: int, cached: int) -> None:
    """All full pages are found, but never the last token: its logits are needed."""
    h = harness(scheduler=scheduler)
    first = h.add(_prompt(length), 1)
    h.run()
    second = h.add(_prompt(length), 1)
    h.run()
    h.check()
    assert (first.ended.cached_tokens, second.ended.cached_tokens) == (0, cached)
    assert h.executor.log[-1].kv_len.tolist() == [cached]
    assert h.executor.log[-1].chunk_len.tolist() == [length - cached]
    stats = h.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (2 * length, cached)


def test_requests_of_one_step_share(harness: Make, scheduler: str, steps_in_flight: int) -> None:
    """n answers to one prompt: it is computed once, and kept once."""
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight)
    streams = [h.add(_prompt(17), 6) for _ in range(5)]
    h.step()
    assert h.executor.log[0].chunk_len.tolist() == [17, 1, 1, 1, 1]
    assert h.executor.log[0].kv_len.tolist() == [0, 16, 16, 16, 16]
    assert h.engine.lifecycle.state.tables.num_held == 4 + 5
    h.run()
    h.check()
    assert [stream.ended.cached_tokens for stream in streams] == [0, 16, 16, 16, 16]
    assert len({tuple(stream.tokens) for stream in streams}) == 5
    assert h.engine.stats().prefix_hits == 64


def test_off(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler, prefix_caching=False)
    streams = [h.add(_prompt(17), 6) for _ in range(3)]
    h.run()
    h.check()
    assert {stream.ended.cached_tokens for stream in streams} == {0}
    stats = h.engine.stats()
    assert stats.prefix_hits == 0


def test_prompt_in_the_middle_is_shared_as_far_as_it_is(harness: Make) -> None:
    h = harness(max_batch_tokens=8, steps_in_flight=1)
    h.add(_prompt(40), 2)
    h.step()
    h.step()
    assert h.engine.lifecycle.state.running.num_computed.max() == 16
    second = h.add(_prompt(40), 2)
    while second.open:
        h.step()
    h.run()
    h.check()
    assert 16 <= second.ended.cached_tokens < 40


@pytest.mark.parametrize("speed", [{}, FAST])
def test_conversation_that_goes_on_finds_the_answer_too(
    harness: Make, steps_in_flight: int, speed: dict[str, Any]
) -> None:
    h = harness(steps_in_flight=steps_in_flight, **speed)
    first = h.add(_prompt(5), 13)
    h.run()
    first_turn = [*_prompt(5), *first.tokens]  # the last of its 18 tokens was never an input
    second = h.add([*first_turn, 1, 2, 3], 3)
    h.run()
    h.check()
    assert second.ended.cached_tokens == 16


@pytest.mark.parametrize("speed", [{}, FAST])
@pytest.mark.parametrize("length", range(3, 12))
def test_stop_token_that_fills_a_page(
    harness: Make, steps_in_flight: int, speed: dict[str, Any], length: int
) -> None:
    """A lease ends at a stop token before it is an input: its page is not full, and not known."""
    free = harness()
    tokens = free.add(_prompt(length), 12)
    free.run()
    stop = tokens.tokens[8]
    h = harness(steps_in_flight=steps_in_flight, **speed)
    first = h.add(_prompt(length), 12, stop=[stop])
    h.run()
    first_turn = [*_prompt(length), *first.tokens]
    for more in ([1], [1, 2, 3, 4, 5]):
        again = h.add([*first_turn, *more], 3)
        h.run()
        h.check()
    assert again.ended.cached_tokens == (len(first_turn) + 1) // 4 * 4  # a prompt's page is full


def test_extra_keys_separate(harness: Make) -> None:
    """A ``cache_salt``, an adapter: the same tokens are not the same content."""
    h = harness()
    cached = []
    for keys in ((), ("a",), ("b",), ("a",), ("a", ""), ()):
        stream = h.add(_prompt(17), 2, extra_keys=keys)
        h.run()
        cached.append(stream.ended.cached_tokens)
    h.check()
    assert cached == [0, 0, 0, 16, 0, 16]


def test_extra_keys_separate_within_a_step(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler, max_batch_tokens=64)
    for keys in ((), ("a",), (), ("a",)):
        h.add(_prompt(17), 2, extra_keys=keys)
    h.step()
    assert h.executor.log[0].kv_len.tolist() == [0, 0, 16, 16]
    h.run()
    h.check()


@pytest.mark.parametrize("index", [0, 3])
def test_pages_of_a_failed_row_are_not_used_again(
    harness: Make, steps_in_flight: int, index: int
) -> None:
    h = harness(steps_in_flight=steps_in_flight)
    h.executor.errors = {(0, index)}
    failed = h.add(_prompt(17), 9)
    h.run()
    assert failed.ended.finish_reason == "error"
    assert len(h.engine.lifecycle.state.tables.index) == 0
    second = h.add(_prompt(17), 9)
    h.run()
    h.check()
    assert second.ended.cached_tokens == 0
    third = h.add(_prompt(17), 9)
    h.run()
    assert third.ended.cached_tokens == 16


def test_who_shares_with_a_failed_row_goes_on(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler)
    h.executor.errors = {(0, 2), (2, 0)}
    for _ in range(4):
        h.add(_prompt(13), 8)
    h.run()
    h.check()
    assert [s.ended.finish_reason for s in h.streams.values()] == [
        "error",
        "length",
        "error",
        "length",
    ]


def test_pages_of_a_failed_row_whose_request_has_left_are_not_shared(harness: Make) -> None:
    """It is aborted while its prompt is in flight, and leaves its pages in the index."""
    h = harness(steps_in_flight=2)
    h.executor.errors = {(1, 0)}
    h.add([7] * 9, 20)
    h.step()
    failed = h.add(_prompt(17), 8)
    h.step()
    h.abort(failed)
    assert len(h.engine.lifecycle.state.tables.index) > 2
    h.step()
    second = h.add(_prompt(17), 8)
    h.run()
    h.check()
    assert second.ended.cached_tokens == 0


def test_restart_forgets_everything(harness: Make, scheduler: str, steps_in_flight: int) -> None:
    """New runners have empty pages: what the index knew is in none of them."""
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight)
    h.add(_prompt(17), 4)
    h.run()
    h.executor.fail_at = {h.executor.num_run}
    second = h.add(_prompt(17), 4)
    h.run()
    h.check()
    assert h.executor.epoch == 1 and second.ended is not None
    assert h.executor.log[-4].kv_len.tolist() == [0]  # the prompt again, from its first token


def test_restart_shares_again_within_the_new_epoch(harness: Make) -> None:
    h = harness(max_batch_tokens=64)
    h.executor.fail_at = {2}
    for _ in range(3):
        h.add(_prompt(17), 6)
    h.run()
    h.check()
    again = [step for step in h.executor.log if step.epoch == 1]  # on trial one after the other
    starts = [int(n) for step in again for n in step.kv_len[step.decoding_batch :]]
    assert starts == [0, 16, 16]


def test_preempted_request_finds_its_own_pages(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler, num_pages=6, max_model_len=24, steps_in_flight=1)
    h.add(_prompt(9), 8)
    h.add([7] * 9, 8)
    h.run()
    h.check()
    assert h.engine.stats().preemptions == 1
    again = [step for step in h.executor.log if step.prefill_batch][-1]
    assert again.kv_len[-1] >= 4
    assert h.engine.stats().prefix_hits == 0  # counted at the first admission only


@pytest.mark.parametrize("moment", range(4))
def test_abort_of_who_wrote_the_pages(harness: Make, steps_in_flight: int, moment: int) -> None:
    """Its steps on their way still run, so its pages are as good as before."""
    h = harness(steps_in_flight=steps_in_flight, max_batch_tokens=8)
    writer = h.add(_prompt(30), 6)
    for _ in range(moment):
        h.step()
    h.abort(writer)
    second = h.add(_prompt(30), 6)
    h.run()
    h.check()
    scheduled = 8 * (moment + steps_in_flight - 1) if moment else 0
    assert second.ended.cached_tokens == min(scheduled, 28)


def test_reader_stays_when_the_writer_leaves(harness: Make, scheduler: str) -> None:
    """A shared page is free only when its last holder goes (I2)."""
    h = harness(scheduler=scheduler, num_pages=12, max_model_len=40)
    writer, reader = h.add(_prompt(17), 1), h.add(_prompt(17), 12)
    h.step()
    assert not writer.open and reader.open
    h.add([3] * 20, 4)  # wants pages
    h.run()
    h.check()


def test_pressure_evicts_the_least_recently_used(harness: Make, scheduler: str) -> None:
    """A prefix in use survives a stream of others through a pool that holds few of them."""
    h = harness(scheduler=scheduler, num_pages=16, max_model_len=40, max_decoding_batch=2)
    cached = []
    for turn in range(20):
        h.add([turn] * 17, 2)
        h.run()
        common = h.add([*_prompt(12), turn, turn], 2)
        h.run()
        cached.append(common.ended.cached_tokens)
    h.check()
    assert cached == [0, *[12] * 19]
    index = h.engine.lifecycle.state.tables.index
    assert 0 < len(index) <= 16  # of 20 x 4 + 3 pages that were full once


def test_unused_prefix_is_evicted(harness: Make) -> None:
    h = harness(num_pages=10, max_model_len=40)
    h.add(_prompt(17), 1)
    h.run()
    h.add([9] * 36, 1)
    h.run()
    again = h.add(_prompt(17), 1)
    h.run()
    h.check()
    assert again.ended.cached_tokens < 16  # its tail went first, the head is in use longest


def test_resubmission_finds_its_pages(harness: Make) -> None:
    """A request that comes back with its output, as after the loss of a client's connection."""
    h = harness()
    first = h.add(_prompt(9), 8)
    for _ in range(4):
        h.step()
    h.abort(first)
    again = h.add(_prompt(9), 8, output=list(first.tokens))
    # Another stream, so the tokens that follow are others.
    h.run()
    h.check()
    assert again.ended.cached_tokens == 12


@pytest.mark.parametrize("pages", [10, 14, 40])
def test_flood_of_equal_prompts(harness: Make, scheduler: str, pages: int) -> None:
    """More requests than rows or pages, all with the same beginning."""
    h = harness(scheduler=scheduler, num_pages=pages, max_model_len=40, **FAST)
    for turn in range(30):
        h.add([*_prompt(16), turn % 5, turn % 3], 1 + turn % 11, client="ab"[turn % 2])
        if turn % 3 == 0:
            h.step()
    h.run()
    h.check()
    assert h.engine.stats().prefix_hits >= 29 * 16 * 0.8


def _workload(seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    requests = []
    for _ in range(10):
        start = draw.choice([_prompt(40), [5] * 40])[: draw.randint(1, 36)]
        requests.append(
            {
                "prompt": start + [draw.randrange(50) for _ in range(draw.randint(0, 4))],
                "max_tokens": draw.randint(12, 24),
                "stop": draw.sample(range(50), draw.choice([0, 1, 3, 12])),
                "priority": draw.randint(0, 2),
                "extra_keys": draw.choice([(), (), ("salt",)]),
            }
        )
    return requests


@pytest.mark.parametrize("seed", range(4))
def test_sharing_never_changes_an_outcome(
    harness: Make, scheduler: str, steps_in_flight: int, seed: int
) -> None:
    """The same requests in a tiny pool, caching on and off, leases of up to 1, 7 and 16."""
    outcomes, preemptions, hits, leases = [], 0, 0, 0
    for caching, num_steps in itertools.product((True, False), (1, 7, 16)):
        h = harness(
            scheduler=scheduler,
            steps_in_flight=steps_in_flight,
            policy=("fcfs", "priority")[seed % 2],
            num_pages=16,
            max_model_len=64,
            max_decoding_batch=4,
            max_batch_tokens=16,
            prefix_caching=caching,
            max_lease=num_steps,
            step_seconds=0.0002,
        )
        h.executor.fail_at = {5 + seed, 11}
        h.executor.errors = {(4, 1)}
        streams = []
        for number, request in enumerate(_workload(seed)):
            streams.append(h.add(**request))
            h.step()
            if number == 6:
                h.abort(streams[2])
        h.run()
        h.check()
        del streams[2]  # how far it came is a matter of speed
        outcomes.append([(s.tokens, s.ended.finish_reason, s.ended.stop_reason) for s in streams])
        stats = h.engine.stats()
        preemptions, hits = preemptions + stats.preemptions, hits + stats.prefix_hits
        leases += sum(step.num_steps > 1 for step in h.executor.log)
    assert len(outcomes) == 6 and all(outcome == outcomes[0] for outcome in outcomes)
    assert preemptions and hits and leases


def test_a_pinned_prompt_stays_for_its_time(harness: Make) -> None:
    h = harness(num_pages=40, steps_in_flight=1)
    prompt = list(range(20))

    def crowd() -> None:
        for _ in range(8):  # each takes six pages
            h.add(20, 2)
        h.run()

    h.add(prompt, 2, pin=Pin(12, 60.0))
    crowd()
    again = h.add(prompt, 2)
    h.run()
    assert again.ended.cached_tokens == 12  # the rest was needed
    h.executor.clock += 60.0
    crowd()
    last = h.add(prompt, 2)
    h.run()
    assert last.ended.cached_tokens == 0
    h.check()
