"""Greedy output is transformers' own, whatever happens on the way: one test for each promise.

Inline against actors is tests/e2e/test_llm.py::test_executors_agree, forks are test_forks.py.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tiers import few

pytestmark = pytest.mark.slow(reason="many chunk and page sizes; test_models.py has a few")

Make = Callable[..., Any]

OUTPUT = 12


def _prompt(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(f"{length}/{seed}")
    return [numbers.randrange(3, 128) for _ in range(length)]


PROMPT = _prompt(13)


@pytest.mark.parametrize("chunk", few(range(1, len(PROMPT) + 1), 5))
def test_chunk_size(chunk: int, tiny_model: Make, served: Make, request_of: Make) -> None:
    """The prompt in chunks of 1, 2, ... tokens, up to all of it at once."""
    tiny = tiny_model("qwen3")
    engine = served(tiny.folder, max_batch_tokens=chunk, max_decoding_batch=1)
    assert engine.run(request_of(0, PROMPT, OUTPUT))[0] == tiny.greedy(PROMPT, OUTPUT)
    assert max(len(step.merge_prompt) for step in engine.steps) == chunk


@pytest.mark.parametrize("page_size", few([1, 2, 3, 4, 5, 8, 16, 32, 64], 4))
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_page_size_hit_or_miss(
    page_size: int, prefix_caching: bool, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """The second time around, what the first computed is found, or not."""
    tiny = tiny_model("qwen3")
    engine = served(tiny.folder, page_size=page_size, prefix_caching=prefix_caching)
    for key in range(2):
        assert engine.run(request_of(key, PROMPT, OUTPUT))[key] == tiny.greedy(PROMPT, OUTPUT)
    found = (len(PROMPT) - 1) // page_size * page_size if prefix_caching else 0
    assert engine.cached == {0: 0, 1: found}


@pytest.mark.parametrize("scheduler", ["v0", "v1"])
@pytest.mark.parametrize("mates", [0, 1, 3, 7])
def test_batch_mates(
    mates: int, scheduler: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Beside others that come, go and are aborted while it runs."""
    tiny = tiny_model("qwen3")
    engine = served(tiny.folder, scheduler=scheduler)
    others = [request_of(key, _prompt(2 + 5 * key, key), 3 * key) for key in range(1, mates + 1)]
    tokens = engine.run(*others[::2], request_of(0, PROMPT, OUTPUT), *others[1::2], stagger=2)
    assert tokens[0] == tiny.greedy(PROMPT, OUTPUT)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("step", few(range(1, 16), 5))
def test_preempted_at_any_step(
    step: int, preemption: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Whatever of it is computed, scheduled or on its way then."""
    tiny = tiny_model("qwen3")
    engine = served(tiny.folder, preemption=preemption, max_batch_tokens=5, max_decoding_batch=2)
    lifecycle, schedule = engine.engine.lifecycle, engine.engine._quarantine.schedule
    calls = 0

    def preempt_then_schedule() -> Any:
        nonlocal calls
        calls += 1
        if calls > step and not lifecycle.state.counters.preemptions:
            for slot in lifecycle.state.running.slots():
                lifecycle.preempt(slot)
        return schedule()

    engine.engine._quarantine.schedule = preempt_then_schedule
    prompts = {0: PROMPT, 1: _prompt(6)}
    tokens = engine.run(*(request_of(key, own, OUTPUT) for key, own in prompts.items()))
    for key, own in prompts.items():
        assert tokens[key] == tiny.greedy(own, OUTPUT)
    assert lifecycle.state.counters.preemptions > 0


@pytest.mark.parametrize("num_steps", few(range(1, 17), 5))
def test_lease(num_steps: int, tiny_model: Make, served: Make, request_of: Make) -> None:
    """Several steps in one call, for rows that end at different ones."""
    tiny = tiny_model("qwen3")
    engine = served(tiny.folder, max_lease=num_steps)
    engine.engine._multi_step.observe(1e-6, 1)  # a fast runner: as long a lease as may be
    prompts = {key: _prompt(4 + key, key) for key in range(4)}
    tokens = engine.run(*(request_of(key, own, 9 + 5 * key) for key, own in prompts.items()))
    for key, own in prompts.items():
        assert tokens[key] == tiny.greedy(own, 9 + 5 * key)
    assert max(step.num_steps for step in engine.steps) == num_steps
