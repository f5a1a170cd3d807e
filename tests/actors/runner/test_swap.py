"""Keys and values that were in host memory are those that would be computed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfin.actors.config import resolve
from rayfin.actors.errors import InvalidConfig, RunnerGroupFailed
from rayfin.actors.messages import Sampling
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.scheduler.policy import multi_step

pytestmark = pytest.mark.slow(reason="many engines")

Make = Callable[..., Any]
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((7, 12, 1, 16, 9))]
MAX_TOKENS = 24
SMALL: dict[str, Any] = {"num_pages": 11, "max_model_len": 44}  # of 5 requests with 8 to 10 pages


def _requests(
    request_of: Make, sampling: Callable[[int], Sampling] = lambda key: Sampling()
) -> Any:
    return [
        request_of(key, prompt, MAX_TOKENS, sampling=sampling(key))
        for key, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("scheduler", ["v0", "v1"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "gpt2"])
def test_swapped_requests_equal_transformers(
    family: str, scheduler: str, caching: bool, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Token for token, and every logit that was drawn from: as one forward without a cache."""
    tiny = tiny_model(family)
    engine = served(
        tiny.folder, scheduler=scheduler, preemption="swap", prefix_caching=caching, **SMALL
    )
    tokens = engine.run(*_requests(request_of), stagger=1)
    for key, prompt in enumerate(PROMPTS):
        assert tokens[key] == tiny.greedy(prompt, MAX_TOKENS)
        expected = tiny.logits(prompt + tokens[key])[len(prompt) - 1 : -1]
        actual = [engine.sampled[key][len(prompt) + i] for i in range(MAX_TOKENS)]
        torch.testing.assert_close(torch.stack(actual), expected, atol=1e-4, rtol=0)
    stats = engine.engine.stats()
    assert stats.preemptions_by_swap == stats.preemptions > 0
    assert stats.swapped_out >= stats.swapped_in > 0


@pytest.mark.parametrize("scheduler", ["v0", "v1"])
def test_swap_recompute_or_never(
    scheduler: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Seeded tokens are the same whatever becomes of the pages; without room, computed again."""
    folder = tiny_model("gemma3_text").folder
    requests = _requests(request_of, lambda key: Sampling(temperature=1.2, seed=1000 + key))

    def run(**args: Any) -> tuple[dict[int, list[int]], Any]:
        engine = served(folder, scheduler=scheduler, **args)
        return engine.run(*requests), engine.engine.stats()

    never, stats = run(max_model_len=44)
    assert stats.preemptions == 0
    swapped, stats = run(preemption="swap", **SMALL)
    assert stats.swapped_in > 0
    recomputed, stats = run(preemption="recompute", **SMALL)
    assert stats.preemptions > 0 == stats.preemptions_by_swap
    page = 2 * 3 * 4 * 2 * 8 * 4 / 2**30
    both, stats = run(preemption="swap", swap_space=5 * page, **SMALL)
    assert stats.preemptions > stats.preemptions_by_swap > 0 and stats.host_pages_total == 5
    assert never == swapped == recomputed == both


def test_swap_is_what_v0_does(tiny_model: Make, served: Make, request_of: Make) -> None:
    for scheduler, swaps in (("v0", True), ("v1", False)):
        engine = served(tiny_model("llama").folder, scheduler=scheduler, **SMALL)
        engine.run(*_requests(request_of))
        stats = engine.engine.stats()
        assert stats.preemptions > 0 and bool(stats.preemptions_by_swap) == swaps


def test_swap_between_leases(
    tiny_model: Make, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted by hand in the middle of leases, with two of them on their way."""
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)  # as long as max_lease says
    tiny = tiny_model("gemma3_text")
    engine = served(tiny.folder, preemption="swap", max_lease=4, prefix_caching=False)
    lifecycle, step, steps = engine.engine.lifecycle, engine.engine.step, 0

    def preempts_sometimes() -> Any:
        nonlocal steps
        steps += 1
        if steps % 3 == 0 and len(lifecycle.state.running):
            lifecycle.preempt(lifecycle.victim())
        return step()

    engine.engine.step = preempts_sometimes
    tokens = engine.run(*_requests(request_of))
    for key, prompt in enumerate(PROMPTS):
        assert tokens[key] == tiny.greedy(prompt, MAX_TOKENS)
    assert engine.engine.stats().swapped_in > 0
    assert max(info.num_steps for info in engine.steps) > 1


def test_crash_while_pages_are_out(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Host memory is emptied with the runner; nothing of it is read afterwards."""
    tiny = tiny_model("llama")
    engine = served(tiny.folder, preemption="swap", prefix_caching=False, **SMALL)
    execute, crashes = engine.runner.execute, 0

    def dies_when_pages_are_out(info: Any) -> Any:
        nonlocal crashes
        if crashes < 2 and engine.engine.stats().host_pages_held and not len(info.moves):
            crashes += 1
            raise RunnerGroupFailed("the runner died")
        return execute(info)

    engine.runner.execute = dies_when_pages_are_out
    tokens = engine.run(*_requests(request_of))
    for key, prompt in enumerate(PROMPTS):
        assert tokens[key] == tiny.greedy(prompt, MAX_TOKENS)
    stats = engine.engine.stats()
    assert (crashes, stats.epoch) == (2, 2) and stats.requeued_by_restart > 0


def test_swap_space_that_there_is_not(tiny_model: Make, engine_args: Make) -> None:
    args = engine_args(tiny_model("llama").folder)
    runner = ModelRunner(args)
    config = replace(resolve(args, *runner.profile()), num_host_pages=10**14)
    with pytest.raises(InvalidConfig) as caught:
        runner.start(config, epoch=0)
    assert caught.value.param == "swap_space"
