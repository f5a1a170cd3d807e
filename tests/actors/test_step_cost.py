"""The table of step times: measured, drawn between its sizes, followed."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from rayfin.actors import step_cost
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.runner.measured_step import decode_step
from rayfin.actors.step_cost import RUNS, SIZES, PromptCost, StepCost


def test_between_and_beyond_its_sizes() -> None:
    cost = StepCost((1, 2, 4), (1.0, 2.0, 3.0))
    assert cost.seconds(np.array([1, 2, 3, 4, 8])).tolist() == [1.0, 2.0, 2.5, 3.0, 5.0]
    assert StepCost((1, 2), (2.0, 1.0)).seconds(2) == 2.0  # a larger step never takes less


def test_measures_as_far_as_it_may() -> None:
    asked: list[int] = []

    def run(tokens: int) -> float:
        asked.append(tokens)
        return tokens / 1000 + (5.0 if len(asked) == 1 else 0.0)  # the first warms up

    cost = StepCost.measured(run, 9, limit=100.0)
    assert cost.seconds(np.array([1, 8])) == pytest.approx([0.001, 0.008])
    assert set(asked) == {size for size in SIZES if size <= 9} and asked.count(2) == RUNS
    asked.clear()
    StepCost.measured(run, 9, limit=0.0)
    assert set(asked) == set(SIZES[:2])


def test_a_sketch_takes_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def run(tokens: int) -> float:
        asked.append(tokens)
        return tokens / 1000 + (0.05 if asked.count(tokens) == 1 else 0.0)  # the first is slow

    cost = StepCost.sketched(run, 64)
    assert cost.seconds(np.array([1, 8])) == pytest.approx([0.001, 0.008])
    assert set(asked) <= {1, 8, 32}
    monkeypatch.setattr(step_cost, "SKETCH_SECONDS", 0.0)
    asked.clear()
    guessed = StepCost.sketched(run, 64)
    assert asked == [1, 1] and guessed.seconds(16) > guessed.seconds(1)


def test_follows_what_steps_take() -> None:
    cost = StepCost((1, 8, 64), (1.0, 2.0, 4.0))
    for _ in range(200):
        cost.observe(8, 3.0)
    assert cost.seconds(8) == pytest.approx(3.0, rel=0.01)
    assert 1.0 < cost.seconds(1) < cost.seconds(8) < cost.seconds(64)
    before = float(cost.seconds(8))
    cost.observe(8, 1000.0)  # a step that something else held up
    assert cost.seconds(8) < 1.2 * before


@pytest.mark.parametrize("tokens", [1, 8, 20])
def test_the_steps_that_are_measured(tokens: int) -> None:
    info = decode_step(tokens, 64, 16)
    assert tokens <= len(info.merge_prompt) < tokens + 8
    assert (info.kv_len + info.chunk_len == 64).all() and set(info.new_pages.tolist()) == {
        0,
        1,
        2,
        3,
    }


def _ran(cost: PromptCost, context: int, tokens: int, seconds: float, decoding: int = 0) -> None:
    """A step of a chunk behind ``context`` tokens, and of decoding rows."""
    kind = SimpleNamespace(
        num_prefill_tokens=tokens,
        decoding_batch=decoding,
        kv_len=np.array([*([9] * decoding), context]),
        chunk_len=np.array([*([1] * decoding), tokens]),
        merge_prompt=np.zeros(decoding + tokens, np.int32),
    )
    cost.observe(cast(SchedulerInfo, kind), cast(StepResult, SimpleNamespace(seconds=seconds)))


def test_late_tokens_of_a_prompt_are_dearer() -> None:
    """By the context before them, whatever small steps beside take."""
    cost = PromptCost()
    assert cost.seconds(0, 1000) == 0.0
    _ran(cost, 100, 7, 3.0)
    assert cost.seconds(0, 7) == pytest.approx(3.0)  # until a larger one has run
    for context in (0, 1000, 100, 9000, 0, 1000, 9000, 100):
        _ran(cost, context, 512, 512 * (0.001 + context * 1e-7), decoding=3)
        _ran(cost, context, 3, 1.0)
    assert cost.seconds(9000, 9100) == pytest.approx(0.19, rel=0.3)
    assert cost.seconds(0, 100) == pytest.approx(0.1, rel=0.5)
    assert cost.seconds(0, 9000) == pytest.approx(cost.seconds(0, 4321) + cost.seconds(4321, 9000))
    assert cost.seconds(8000, 16_000) < cost.seconds(100_000, 108_001)
    assert cost.seconds(10, 10) == cost.seconds(10, 3) == 0.0
    before = cost.seconds(0, 100)
    _ran(cost, 100, 512, 512.0)  # what it has drawn is drawn anew
    assert cost.seconds(0, 100) > 2 * before
