"""Prompts beside streams: as many tokens as fit in the gap that was chosen."""

from collections.abc import Callable
from typing import Any

import pytest

from rayfin.actors.messages import SchedulerInfo
from rayfin.actors.scheduler.policy.chunk_budget import LEAST_TOKENS

Make = Callable[..., Any]

TARGET = 0.010
SETTINGS = {
    "itl_target": TARGET,
    "max_batch_tokens": 128,
    "max_model_len": 600,
    "num_pages": 2000,
    "page_size": 16,
    "step_seconds": 0.002,
}


def busy(make: Make, **settings: Any) -> Any:
    """An engine with a stream, which then gets long prompts."""
    h = make(**SETTINGS | settings)
    h.executor.token_seconds = 0.0002
    h.add(5, 150)
    for _ in range(10):
        h.step()
    for _ in range(6):
        h.add(500, 1)
    return h


def mixed(h: Any) -> list[SchedulerInfo]:
    """The steps with prompts beside streams."""
    return [info for info in h.executor.log if info.decoding_batch and info.prefill_batch]


def seconds(h: Any, info: SchedulerInfo) -> float:
    return float(h.executor.step_seconds + len(info.merge_prompt) * h.executor.token_seconds)


def test_steps_beside_streams_take_as_long_as_they_may(harness: Make) -> None:
    h = busy(harness)
    h.run()
    h.check()
    taken = [seconds(h, info) for info in mixed(h)]
    settled = taken[len(taken) // 4 :]
    assert len(settled) > 40
    assert max(taken) < 1.5 * TARGET  # before much is known
    assert sum(settled) / len(settled) == pytest.approx(TARGET, rel=0.1)


def test_a_slower_machine_gets_smaller_chunks(harness: Make) -> None:
    h = busy(harness)
    while len(mixed(h)) < 25:
        h.step()
    before = mixed(h)[-1].num_prefill_tokens
    h.executor.token_seconds *= 2
    while len(mixed(h)) < 50:
        h.step()
    after = mixed(h)[-1]
    assert after.num_prefill_tokens < before * 0.6
    assert seconds(h, after) == pytest.approx(TARGET, rel=0.15)


def test_prompts_alone_fill_the_step(harness: Make) -> None:
    h = harness(**SETTINGS)
    for _ in range(2):
        h.add(500, 1)
    h.run()
    h.check()
    assert len(h.executor.log[0].merge_prompt) == 128 and not mixed(h)[5:]


def test_a_gap_that_cannot_be_had_does_not_stop_prompts(harness: Make) -> None:
    h = busy(harness, itl_target=0.0001)
    h.run()
    h.check()
    chunks = [info.num_prefill_tokens for info in mixed(h)]
    assert max(chunks) == LEAST_TOKENS and chunks.count(LEAST_TOKENS) > len(chunks) / 2


def test_without_a_target_the_budget_is_the_step_s(harness: Make) -> None:
    h = busy(harness, itl_target=None)
    h.run()
    assert max(len(info.merge_prompt) for info in mixed(h)) == 128
