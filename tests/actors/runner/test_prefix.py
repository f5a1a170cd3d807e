"""Keys and values found in the cache are those that would be computed."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayfin.actors.messages import Sampling

Make = Callable[..., Any]
MAX_TOKENS = 8
FAMILIES = ["llama", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2"]


def _prompt(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 128) for _ in range(length)]


def _check(tiny: Any, engine: Any, key: int, prompt: list[int], tokens: list[int]) -> None:
    """Tokens and logits of a request are those of one full forward without a cache."""
    expected = tiny.logits(prompt + tokens)[len(prompt) - 1 : -1]
    actual = torch.stack([engine.sampled[key][len(prompt) + i] for i in range(len(tokens))])
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    assert tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_second_request_finds_the_first_ones_pages(
    family: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Longer than every sliding window (8, 12): its pages stay good for requests that comes."""
    tiny, engine = tiny_model(family), served(tiny_model(family).folder)
    prompts = [_prompt(33), _prompt(33), _prompt(33)[:18], _prompt(33) + _prompt(9, seed=1)]
    for key, prompt in enumerate(prompts):
        tokens = engine.run(request_of(key, prompt, MAX_TOKENS))[key]
        _check(tiny, engine, key, prompt, tokens)
    assert engine.cached == {0: 0, 1: 32, 2: 16, 3: 32}


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_page_sizes(
    family: str, page_size: int, tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny, prompt = tiny_model(family), _prompt(35)
    engine = served(tiny.folder, page_size=page_size)
    for key in range(2):
        tokens = engine.run(request_of(key, prompt, MAX_TOKENS))[key]
        _check(tiny, engine, key, prompt, tokens)
    assert engine.cached[1] == (len(prompt) - 1) // page_size * page_size


@pytest.mark.parametrize("scheduler", ["v0", "v1"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_requests_of_one_step_share(
    family: str, scheduler: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """The writer's keys and values are there before a reader of the same step looks."""
    tiny, prompt = tiny_model(family), _prompt(17)
    engine = served(tiny.folder, scheduler=scheduler, max_model_len=64, max_batch_tokens=64)
    prompts = [prompt, prompt, prompt[:9] + [5, 6, 7], prompt]
    tokens = engine.run(*(request_of(key, p, MAX_TOKENS) for key, p in enumerate(prompts)))
    assert engine.steps[0].kv_len.tolist() == [0, 16, 8, 16]
    for key, own in enumerate(prompts):
        _check(tiny, engine, key, own, tokens[key])


@pytest.mark.parametrize("max_lease", [1, 16])
def test_conversation(max_lease: int, tiny_model: Make, served: Make, request_of: Make) -> None:
    """Each turn finds the one before, answer included; chunks, and stops at a page's end."""
    tiny = tiny_model("gemma3_text")
    engine = served(tiny.folder, max_lease=max_lease, max_batch_tokens=10)
    entries = _prompt(6)
    for turn in range(8):
        tokens = engine.run(request_of(turn, entries, MAX_TOKENS))[turn]
        _check(tiny, engine, turn, entries, tokens)
        entries = entries + tokens + _prompt(1 + turn, seed=turn)
    assert all(engine.cached[turn] > engine.cached[turn - 1] for turn in range(1, 8))


def test_seeded_sampling(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompt = tiny_model("llama"), _prompt(19)

    def requests(first: int) -> list[Any]:
        return [
            request_of(first + i, prompt, 20, sampling=Sampling(temperature=1.3, seed=i))
            for i in range(4)
        ]

    with_cache, without = served(tiny.folder), served(tiny.folder, prefix_caching=False)
    expected = list(without.run(*requests(0)).values())
    assert list(with_cache.run(*requests(0)).values()) == expected
    assert list(with_cache.run(*requests(10)).values()) == expected
    assert without.engine.stats().prefix_hits == 0
    assert with_cache.engine.stats().prefix_hits >= 7 * 16
    assert len({tuple(own) for own in expected}) == 4


def test_pressure(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Pages are evicted and written anew, requests preempted, in a pool of twelve."""
    tiny = tiny_model("gemma3_text")
    engine = served(tiny.folder, num_pages=12, max_model_len=44)
    prompts = [_prompt(13)[: 5 + key] + _prompt(8, seed=key) for key in range(8)]
    for rounds in range(2):
        keys = range(10 * rounds, 10 * rounds + 8)
        requests = [request_of(k, p, 22) for k, p in zip(keys, prompts, strict=True)]
        tokens = engine.run(*requests, stagger=1)
        for key, prompt in zip(keys, prompts, strict=True):
            logits = tiny.logits(prompt + tokens[key])
            assert tokens[key] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    stats = engine.engine.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0
