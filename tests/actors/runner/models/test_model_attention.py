"""Families that do not ask transformers' attention registry give transformers' own tokens."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayfin.actors.runner.models.model_attention import with_positions

Make = Callable[..., Any]
FAMILIES = ("bloom", "codegen", "falcon", "gpt_neo")  # each in its own way


def _prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(3, 128) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_with_chunks(family: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model(family), _prompts((1, 4, 17, 33))
    requests = [request_of(key, prompt, 10, eos=[2]) for key, prompt in enumerate(prompts)]
    tokens = served(tiny.folder, max_batch_tokens=8, max_model_len=64).run(*requests, stagger=1)
    for key, prompt in enumerate(prompts):
        assert tokens[key] == tiny.greedy(prompt, 10)


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted(family: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model(family), _prompts((7, 8, 13, 16, 4, 11))
    whole = {"disable_hybrid_kv_cache_manager": True}  # GPT-Neo's windows would leave more room
    engine = served(tiny.folder, num_pages=12, max_model_len=44, **whole)
    requests = [request_of(key, prompt, 28, eos=[2]) for key, prompt in enumerate(prompts)]
    tokens = engine.run(*requests)
    assert engine.engine.stats().preemptions > 0
    for key, prompt in enumerate(prompts):
        assert tokens[key] == tiny.greedy(prompt, 28)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_get_the_position_of_the_key(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 4, 300, 16).to(dtype)
    slopes, scale = torch.tensor([0.5, 0.25, 0.125, 0.0625]), 0.25
    positions = torch.arange(700, 1000)
    longer, keys = with_positions(query, key, positions, slopes, scale)
    assert longer.shape == keys.shape == (1, 4, 300, 24) and keys.dtype == dtype
    scores = longer.float() @ keys.float().transpose(-1, -2) * scale
    plain = query.float() @ key.float().transpose(-1, -2) * scale
    biased = plain + slopes[:, None, None] * positions
    torch.testing.assert_close(scores, biased, rtol=1e-5, atol=1e-3)
