"""Each architecture gives transformers' own tokens and logits, whatever the batch and chunks."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayfin.actors.errors import InvalidConfig
from rayfin.kernels.cpu.kernels import try_kernels

EOS = 2
MAX_TOKENS = 10
LENGTHS = (1, 4, 5, 16, 17, 33)  # page_size is 4: exact pages, and one past them
Make = Callable[..., Any]


def _prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(3, 128) for _ in range(length)] for length in lengths]


def _check(tiny: Any, prompts: list[list[int]], tokens: dict[int, list[int]]) -> None:
    for key, prompt in enumerate(prompts):
        assert tokens[key] == tiny.greedy(prompt, MAX_TOKENS), f"prompt of {len(prompt)}"


def test_alone(architecture: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model(architecture), _prompts()
    engine = served(tiny.folder, max_batch_tokens=64)
    tokens = {}
    for key, prompt in enumerate(prompts):
        tokens |= engine.run(request_of(key, prompt, MAX_TOKENS, eos=[EOS]))
    _check(tiny, prompts, tokens)


def test_mixed_with_chunks(
    architecture: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny, prompts = tiny_model(architecture), _prompts()
    engine = served(tiny.folder, max_batch_tokens=10)
    requests = [request_of(key, p, MAX_TOKENS, eos=[EOS]) for key, p in enumerate(prompts)]
    _check(tiny, prompts, engine.run(*requests, stagger=1))
    assert any(step.decoding_batch and step.prefill_batch for step in engine.steps)
    assert any((step.last_pos < 0).any() for step in engine.steps)


def test_v0(architecture: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model(architecture), _prompts()
    engine = served(tiny.folder, scheduler="v0", max_model_len=64)
    requests = [request_of(key, p, MAX_TOKENS, eos=[EOS]) for key, p in enumerate(prompts)]
    _check(tiny, prompts, engine.run(*requests, stagger=1))


def test_logits(architecture: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    """Within 1e-4 of one full forward: after whole prompts, chunked prompts and decode tokens."""
    tiny, prompts = tiny_model(architecture), _prompts()
    engine = served(tiny.folder, max_batch_tokens=10)
    requests = [request_of(key, prompt, MAX_TOKENS) for key, prompt in enumerate(prompts)]
    tokens = engine.run(*requests, stagger=1)
    for key, prompt in enumerate(prompts):
        context = prompt + tokens[key]
        expected = tiny.logits(context)
        positions = sorted(engine.sampled[key])
        assert positions == list(range(len(prompt), len(context)))
        actual = torch.stack([engine.sampled[key][position] for position in positions])
        torch.testing.assert_close(actual, expected[len(prompt) - 1 : -1], atol=1e-4, rtol=0)
        assert tokens[key] == expected[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("scheduler", ["v0", "v1"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_preempted(
    family: str, scheduler: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Pages pass from hand to hand, and so do slots; the tokens stay."""
    tiny, prompts = tiny_model(family), _prompts((7, 8, 13, 16, 4, 11))
    engine = served(tiny.folder, num_pages=12, max_model_len=44, scheduler=scheduler)
    requests = [request_of(key, prompt, 28) for key, prompt in enumerate(prompts)]
    tokens = engine.run(*requests)
    assert engine.engine.stats().preemptions > 0
    for key, prompt in enumerate(prompts):
        logits = tiny.logits(prompt + tokens[key])
        assert tokens[key] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("attention", ["torch", "reference", "cpu"])
def test_attention_backends(
    attention: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    if attention == "cpu" and try_kernels(1) is None:
        pytest.skip("the CPU kernels are not built")
    tiny, prompts = tiny_model("gemma2"), _prompts()
    engine = served(tiny.folder, attention=attention)
    requests = [request_of(key, p, MAX_TOKENS, eos=[EOS]) for key, p in enumerate(prompts)]
    _check(tiny, prompts, engine.run(*requests))


def test_page_sizes(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model("mistral"), _prompts()
    for page_size in (1, 3, 16, 64):
        engine = served(tiny.folder, page_size=page_size)
        requests = [request_of(key, p, MAX_TOKENS, eos=[EOS]) for key, p in enumerate(prompts)]
        _check(tiny, prompts, engine.run(*requests))


@pytest.mark.parametrize("family", ["phimoe", "llama4_text"])
def test_limits_that_only_the_mask_knows(
    family: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """A window that no call of attention names, and one whose start is rounded."""
    tiny, prompts = tiny_model(family), _prompts()
    for budget in (5, 24):
        engine = served(tiny.folder, max_batch_tokens=budget, max_decoding_batch=5)
        requests = [request_of(key, p, MAX_TOKENS, eos=[EOS]) for key, p in enumerate(prompts)]
        _check(tiny, prompts, engine.run(*requests, stagger=1))


def test_pages_divide_chunks(tiny_model: Make, served: Make) -> None:
    with pytest.raises(InvalidConfig, match="page_size"):
        served(tiny_model("llama4_text").folder, page_size=3)


def test_two_models_in_one_process(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Nothing is global: steps of two engines may alternate."""
    names, prompt = ("llama", "qwen3"), _prompts()[4]
    engines = [served(tiny_model(name).folder) for name in names]
    for engine in engines:
        engine.engine.add(request_of(0, prompt, MAX_TOKENS, eos=[EOS]))
    tokens: list[list[int]] = [[], []]
    while any(engine.engine.has_work for engine in engines):
        for own, engine in zip(tokens, engines, strict=True):
            for deltas in engine.engine.step().values():
                own += deltas.tokens.tolist()
    for name, own in zip(names, tokens, strict=True):
        assert own == tiny_model(name).greedy(prompt, MAX_TOKENS)
