"""What each scheduler puts into a step: limits, order, preemption."""

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]


def test_v1_mixes_decoding_rows_and_chunks(harness: Make) -> None:
    h = harness(max_batch_tokens=8, steps_in_flight=1)
    h.add(4, 10)
    h.step()
    h.add(20, 3)
    for _ in range(3):
        h.step()
    shapes = [(step.decoding_batch, step.chunk_len.tolist()) for step in h.executor.log]
    assert shapes == [(0, [4]), (1, [1, 7]), (1, [1, 7]), (1, [1, 6])]
    assert [step.last_pos.tolist() for step in h.executor.log[1:]] == [[0, -1], [0, -1], [0, 5]]
    h.run()
    h.check()


def test_v1_schedules_no_prefill_row_without_budget(harness: Make) -> None:
    """Erratum of the seed: no row of zero or fewer tokens when decoding rows fill the step."""
    h = harness(max_batch_tokens=3, max_decoding_batch=4, steps_in_flight=1)
    for _ in range(3):
        h.add(1, 12)
    h.step()
    waiting = h.add(5, 2)
    for _ in range(6):
        h.step()
    assert all(step.prefill_batch == 0 for step in h.executor.log[1:])
    assert [len(step.merge_prompt) for step in h.executor.log] == [3] * 7
    assert waiting.tokens == []
    h.run()
    h.check()


def test_v1_stops_a_prompt_in_the_middle_when_the_budget_is_gone(harness: Make) -> None:
    """The same for a prompt that has begun: it pauses, gets no row, and goes on later."""
    h = harness(max_batch_tokens=4, max_decoding_batch=4, steps_in_flight=1)
    h.add(10, 2)
    h.add(1, 3)
    h.run()
    h.check()
    assert all(len(step.merge_prompt) <= 4 for step in h.executor.log)


def test_max_prefill_batch(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler, max_prefill_batch=2, max_batch_tokens=64)
    for _ in range(7):
        h.add(3, 2)
    h.run()
    h.check()
    assert max(step.prefill_batch for step in h.executor.log) == 2


def test_max_prefill_batch_counts_prompts_that_go_on(harness: Make) -> None:
    """Prompts in the middle and new ones share the limit."""
    h = harness(max_prefill_batch=1, max_batch_tokens=8, max_decoding_batch=8)
    h.add(12, 2)
    h.add(4, 2)
    h.run()
    h.check()
    assert h.executor.log[1].prefill_batch == 1


def test_max_decoding_batch(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler, max_decoding_batch=3, max_batch_tokens=64)
    for _ in range(9):
        h.add(3, 5)
    h.run()
    h.check()
    assert max(step.decoding_batch for step in h.executor.log) == 3


def test_v0_step_is_whole_prompts_or_decoding(harness: Make) -> None:
    h = harness(scheduler="v0", max_model_len=30, max_batch_tokens=30, steps_in_flight=1)
    h.add(20, 4)
    h.add(9, 4)
    h.add(5, 4)  # 20 + 9 + 5 > 30: waits for the next step
    h.run()
    h.check()
    first, second, third = h.executor.log[:3]
    assert first.chunk_len.tolist() == [20, 9]
    assert second.chunk_len.tolist() == [5] and second.decoding_batch == 0
    assert third.decoding_batch == 3 and third.prefill_batch == 0
    for step in h.executor.log:  # the executor asserts the same
        assert step.prefill_batch == 0 or (step.kv_len == 0).all()


def test_fcfs_admits_in_order_of_arrival(harness: Make, scheduler: str) -> None:
    """Priorities do not count, and a short prompt does not overtake a long one."""
    h = harness(scheduler=scheduler, max_decoding_batch=2, max_batch_tokens=8)
    for length, priority in ((30, 2), (1, 1), (20, 0), (2, 3), (9, 0)):
        h.add(length, 3, priority=priority)
    h.run()
    h.check()
    assert h.executor.entered == [0, 1, 2, 3, 4]


def test_priority_admits_lower_numbers_first_then_by_arrival(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler, policy="priority", max_decoding_batch=1)
    for priority in (1, 2, 0, 1, 0):
        h.add(3, 2, priority=priority)
    h.run()
    h.check()
    assert h.executor.entered == [2, 4, 0, 3, 1]


def test_flood_starves_nobody(harness: Make, scheduler: str) -> None:
    """I9: with new requests at every step, each one ends within a bounded number of steps."""
    h = harness(scheduler=scheduler, max_decoding_batch=4, num_pages=24, max_batch_tokens=16)
    for now in range(150):
        if now % 3 == 0:
            h.add(1 + now % 17, 2 + now % 5)
        h.step()
        ahead = {s.seed for s in h.streams.values() if s.open}
        if ahead:  # the oldest open request is never far behind the newest finished one
            finished = [s.seed for s in h.streams.values() if not s.open]
            assert max(finished, default=0) - min(ahead) < 8
    h.run()
    h.check()


def test_long_prompt_advances_under_a_flood_of_short_ones(harness: Make) -> None:
    h = harness(max_batch_tokens=4, max_decoding_batch=4, max_model_len=80)
    long = h.add(60, 2)
    for _ in range(60):
        h.add(1, 3)
        h.step()
    assert long.ended is not None
    h.run()
    h.check()


def test_long_prompts_leave_room_for_others(harness: Make) -> None:
    """A threshold caps the chunk of one prompt in a step, at admission and as it goes on."""
    h = harness(max_batch_tokens=16, long_prefill_token_threshold=6, steps_in_flight=1)
    long, short = h.add(20, 2), h.add(4, 2)
    h.step()
    assert h.executor.log[0].chunk_len.tolist() == [6, 4]
    assert len(short.tokens) == 1 and long.tokens == []
    h.run()
    h.check()
    assert [step.chunk_len.tolist()[-1] for step in h.executor.log[1:4]] == [6, 6, 2]


def test_scored_prompts_have_no_more_logits_than_memory_was_measured_for(harness: Make) -> None:
    h = harness(max_batch_tokens=32, max_decoding_batch=6)
    scored = [h.add(length, 2, prompt_logprobs=1, logprobs=0) for length in (25, 3, 9)]
    other = h.add(30, 2)
    h.run()
    h.check()
    assert [len(stream.prompt_logprobs) for stream in scored] == [24, 2, 8]
    scoring: dict[int, bool] = {}  # by handle
    for step in h.executor.log:
        scoring.update((new.handle, new.sampling.prompt_logprobs == 1) for new in step.new_requests)
        rows = range(step.decoding_batch, len(step.ids))
        assert sum(int(step.chunk_len[row]) for row in rows if scoring[int(step.ids[row])]) <= 6
    assert max(len(step.merge_prompt) for step in h.executor.log) > 24  # the other is not held up
    assert other.ended.finish_reason == "length"


def test_two_long_prompts_share_a_step(harness: Make) -> None:
    h = harness(max_batch_tokens=16, long_prefill_token_threshold=6, steps_in_flight=1)
    for _ in range(3):
        h.add(20, 2)
    h.step()
    assert h.executor.log[0].chunk_len.tolist() == [6, 6, 4]
    h.run()
    h.check()


def test_better_requests_that_keep_coming_starve_nobody(harness: Make, scheduler: str) -> None:
    """I9: aging bounds how long a low priority waits; strict levels do not."""
    waited = {}
    for aging in (0.0, 0.01):
        h = harness(
            scheduler=scheduler,
            policy="priority",
            priority_aging=aging,
            max_decoding_batch=1,
            step_seconds=0.001,
        )
        for _ in range(3):
            h.add(3, 2, priority=0)
        low = h.add(3, 2, priority=5)
        for _ in range(400):  # one comes for each that goes
            h.add(3, 2, priority=0)
            h.step()
            h.step()
            if not low.open:
                break
        waited[aging] = h.executor.clock
        still_open = low.open
        h.run()
        h.check()
        assert still_open == (not aging)
    assert 0.05 <= waited[0.01] <= 0.05 + 0.02


def _two_at_the_edge(h: Any, **second: int) -> tuple[Any, Any]:
    """Two requests that outgrow a pool of 4 pages of 4 tokens together, each fits alone."""
    return h.add(7, 8, **second), h.add(7, 8)


def test_preemption_takes_the_latest_arrival(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler, num_pages=4, max_model_len=16, steps_in_flight=1)
    old, new = _two_at_the_edge(h)
    h.run()
    h.check()
    assert h.engine.stats().preemptions == 1
    assert h.executor.entered == [old.seed, new.seed, new.seed]


def test_preemption_takes_the_lowest_priority(harness: Make, scheduler: str) -> None:
    h = harness(
        scheduler=scheduler, num_pages=4, max_model_len=16, policy="priority", steps_in_flight=1
    )
    unimportant, important = _two_at_the_edge(h, priority=5)
    h.run()
    h.check()
    assert h.engine.stats().preemptions == 1
    assert h.executor.entered == [important.seed, unimportant.seed, unimportant.seed]


def test_preempted_request_goes_before_later_ones(harness: Make, scheduler: str) -> None:
    h = harness(
        scheduler=scheduler, num_pages=4, max_model_len=16, max_decoding_batch=2, steps_in_flight=1
    )
    old, new = _two_at_the_edge(h)
    later = h.add(2, 2)
    h.run()
    h.check()
    assert h.executor.entered == [old.seed, new.seed, new.seed, later.seed]


def test_preempted_request_keeps_its_tokens(harness: Make, steps_in_flight: int) -> None:
    """I11: what was delivered is not sampled again; the recomputation is a prompt."""
    h = harness(num_pages=4, max_model_len=16, steps_in_flight=steps_in_flight)
    _, new = _two_at_the_edge(h)
    before = 0
    while not h.engine.lifecycle.state.counters.preemptions:
        before = len(new.tokens)
        h.step()
    assert before > 0 and len(new.tokens) >= before
    h.run()
    h.check()
    again = [step for step in h.executor.log if step.prefill_batch and step.step > 0]
    assert again[0].chunk_len[-1] >= 7 + before


def test_admission_leaves_room_for_the_next_token(harness: Make, scheduler: str) -> None:
    """A prompt that fills the last free page would be preempted at its first token."""
    h = harness(scheduler=scheduler, num_pages=4, max_model_len=16)
    old = h.add(9, 3)
    new = h.add(4, 3)
    while old.open:
        assert h.executor.entered in ([], [old.seed])
        h.step()
    h.run()
    h.check()
    assert new.ended is not None and h.engine.stats().preemptions == 0


def test_step_that_preempts_admits_nobody(harness: Make) -> None:
    """The pages just won are for the running requests, even if a better one waits."""
    h = harness(num_pages=4, max_model_len=16, policy="priority", steps_in_flight=1)
    _two_at_the_edge(h)
    h.step()
    urgent = h.add(1, 1, priority=-1)
    h.run()
    h.check()
    preempting = next(step for step in h.executor.log if step.finished)
    after = h.executor.log[preempting.step + 1]
    assert preempting.new_requests == []
    assert [new.sampling.seed for new in after.new_requests] == [urgent.seed]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15])
def test_exact_fit(harness: Make, scheduler: str, length: int) -> None:
    """I13: a request that takes every page there is runs, alone, to its last token."""
    h = harness(scheduler=scheduler, num_pages=4, max_model_len=16, page_size=4)
    for _ in range(3):
        h.add(length, 16 - length)
    h.run()
    h.check()
