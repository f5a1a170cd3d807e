"""How long a step may take: by its work and the pace measured, never too short."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayfin.actors.messages import SchedulerInfo
from rayfin.actors.scheduler.faults.watchdog import FIRST_STEPS, MULTIPLE, Watchdog
from rayfin.actors.timing import (
    FIRST_STEPS_LIMIT_SECONDS,
    LATER_FIRST_STEPS_LIMIT_SECONDS,
    MAX_RESTART_PAUSE_SECONDS,
    MIN_STEP_LIMIT_SECONDS,
)


def step(
    decoding: int = 0, chunks: tuple[int, ...] = (), kv_len: int = 0, num_steps: int = 1
) -> Any:
    lengths = np.array([1] * decoding + list(chunks), np.int32)
    rows = len(lengths)
    zeros = np.zeros(rows, np.int32)
    return SchedulerInfo(
        epoch=0,
        step=0,
        ids=zeros,
        chunk_idx=zeros,
        chunk_len=lengths,
        merge_prompt=np.zeros(int(lengths.sum()), np.int32),
        kv_len=zeros + kv_len,
        kv_page_len=zeros,
        last_pos=zeros,
        is_decoding=np.arange(rows) < decoding,
        decoding_batch=decoding,
        prefill_batch=len(chunks),
        new_pages=np.zeros(0, np.int32),
        new_pages_len=zeros,
        num_steps=num_steps,
    )


@pytest.fixture
def trained() -> Watchdog:
    """Decode steps of 10 ms, prompts of 1 ms per token."""
    watchdog = Watchdog()
    for _ in range(FIRST_STEPS):
        watchdog.observe(step(8), 0.01)
    watchdog.observe(step(0, (100,)), 0.1)
    return watchdog


def test_first_steps_get_time_to_compile() -> None:
    watchdog = Watchdog()
    for _ in range(FIRST_STEPS):
        assert watchdog.patience(step(1)) == FIRST_STEPS_LIMIT_SECONDS
        watchdog.observe(step(1), 1.0)
    assert watchdog.patience(step(1)) == MULTIPLE * 1.0


@pytest.mark.parametrize(
    ("slowest", "patience"),
    [(0.01, LATER_FIRST_STEPS_LIMIT_SECONDS), (1.0, MULTIPLE * 1.0), (9.0, MULTIPLE * 9.0)],
)
def test_first_steps_of_the_next_runners_get_what_those_before_took(
    slowest: float, patience: float
) -> None:
    watchdog = Watchdog()
    for seconds in (slowest, 0.01, 0.01):
        watchdog.observe(step(1), seconds)
    for _ in range(2):
        watchdog.restart()
        assert watchdog.patience(step(1)) == pytest.approx(patience, rel=0.01)
        for _ in range(FIRST_STEPS):
            watchdog.observe(step(1), 0.01)  # the slowest of all counts


def test_runners_that_died_in_their_first_steps_have_told_nothing() -> None:
    watchdog = Watchdog()
    watchdog.observe(step(1), 0.01)
    watchdog.restart()
    assert watchdog.patience(step(1)) == FIRST_STEPS_LIMIT_SECONDS


def test_short_steps_get_the_floor(trained: Watchdog) -> None:
    assert trained.patience(step(8)) == MIN_STEP_LIMIT_SECONDS
    assert trained.patience(step(8, (50,))) == MIN_STEP_LIMIT_SECONDS


def test_long_prompts_get_time_by_their_tokens_and_depth(trained: Watchdog) -> None:
    shallow, deep = step(0, (8000,)), step(0, (8000,), kv_len=100_000)
    assert trained.patience(shallow) > MULTIPLE * 8000 * 0.001 * 0.9
    assert trained.patience(deep) > 8 * trained.patience(shallow)


def test_lease_counts_as_its_steps(trained: Watchdog) -> None:
    trained.observe(step(8, num_steps=10), 10.0)  # a second each: the slowest so far
    assert trained.patience(step(8, num_steps=16)) == pytest.approx(MULTIPLE * 16.0)


def test_slowest_pace_counts_and_is_forgotten_slowly(trained: Watchdog) -> None:
    trained.observe(step(8), 2.0)
    after = trained.patience(step(8))
    assert after == pytest.approx(MULTIPLE * 2.0)
    for _ in range(100):
        trained.observe(step(8), 0.01)
    assert after * 0.8 < trained.patience(step(8)) < after
    for _ in range(10_000):
        trained.observe(step(8), 0.01)
    assert trained.patience(step(8)) == MIN_STEP_LIMIT_SECONDS


def test_backoff_doubles_until_a_step_is_done() -> None:
    watchdog = Watchdog()
    waits = []
    for _ in range(12):
        waits.append(watchdog.backoff())
        watchdog.restart()
    assert waits[:6] == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0] and waits[-1] == MAX_RESTART_PAUSE_SECONDS
    watchdog.observe(replace(step(1)), 0.1)
    assert watchdog.backoff() == 0.0


def test_a_large_image_behind_a_short_chunk_is_no_hang(trained: Watchdog) -> None:
    """Of 4000 tokens, of which the chunk has 10: the tower computes all of them."""
    few, usual = replace(step(0, (10,)), span_tokens=4000), step(0, (8000,))
    before = trained.patience(usual)
    assert trained.patience(few) == FIRST_STEPS_LIMIT_SECONDS  # of the first image
    trained.observe(few, 8.005, 8.0)
    assert trained.patience(few) > MULTIPLE * 8.0
    assert trained.patience(replace(few, span_tokens=8000)) > MULTIPLE * 16.0
    assert trained.patience(step(0, (10,))) == MIN_STEP_LIMIT_SECONDS
    assert trained.patience(usual) <= before, "the tower's time counts for a text"
    for _ in range(10):
        trained.observe(few, 0.005)  # the runner has kept its embeddings
    assert trained.patience(few) > MULTIPLE * 8.0
