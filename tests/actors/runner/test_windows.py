"""Tokens stay those of transformers where pages behind windows are freed while requests run."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfin.actors.config import resolve
from rayfin.actors.messages import BeamParams, Sampling
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.cache.window_tables import WindowTables

Make = Callable[..., Any]
GROUPS = {"gemma3_text": 2, "gpt_oss": 2, "gemma2": 2, "mistral": 0}  # beside the full one
FAMILIES = list(GROUPS)


def _prompt(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 128) for _ in range(length)]


def _check(tiny: Any, engine: Any, key: int, prompt: list[int], tokens: list[int]) -> None:
    """Tokens and logits of a request are those of one full forward without a cache."""
    expected = tiny.logits(prompt + tokens)[len(prompt) - 1 : -1]
    actual = torch.stack([engine.sampled[key][len(prompt) + i] for i in range(len(tokens))])
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    assert tokens == expected.argmax(-1).tolist()


def _tables(engine: Any) -> WindowTables:
    tables = engine.engine.lifecycle.state.tables
    assert isinstance(tables, WindowTables)
    return tables


def _highest_held(engine: Any) -> Callable[[], int]:
    """Watches the pages that are held after each step."""
    tables, step, highest = _tables(engine), engine.engine.step, 0

    def watched() -> Any:
        nonlocal highest
        deltas = step()
        highest = max(highest, tables.num_held)
        engine.engine.check_integrity()
        return deltas

    engine.engine.step = watched
    return lambda: highest


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts(family: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    """Windows of 8 or 12 tokens, pages of 4, chunks of 10: two prompts of many windows."""
    tiny = tiny_model(family)
    engine = served(tiny.folder, max_batch_tokens=10, prefix_caching=False)
    assert engine.config.windows.beside == GROUPS[family]
    highest = _highest_held(engine)
    prompts = [_prompt(150), _prompt(90, seed=1)]
    tokens = engine.run(*(request_of(key, prompt, 40) for key, prompt in enumerate(prompts)))
    for key, prompt in enumerate(prompts):
        _check(tiny, engine, key, prompt, tokens[key])
    whole = -(-190 // 4) + -(-130 // 4)  # entries
    assert highest() <= sum(engine.config.pages_of(entries) for entries in (48, 33))
    assert highest() < (whole + 30 if GROUPS[family] else 20)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_prefix_hits(
    family: str, page_size: int, tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny, prompt = tiny_model(family), _prompt(70)
    engine = served(tiny.folder, page_size=page_size)
    prompts = [prompt, prompt, prompt[:50] + _prompt(9, seed=1), prompt + _prompt(30, seed=2)]
    for key, one in enumerate(prompts):
        tokens = engine.run(request_of(key, one, 8))[key]
        _check(tiny, engine, key, one, tokens)
    assert [engine.cached[key] for key in range(4)] == [
        *(0, 69 // page_size * page_size),
        *(50 // page_size * page_size, 70 // page_size * page_size),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_under_pressure(
    family: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Few pages: requests preempt others, hits are shorter where pages were taken."""
    tiny = tiny_model(family)
    settings = {"num_pages": 15, "max_model_len": 120, "max_batch_tokens": 12}
    engine = served(tiny.folder, **settings)
    _highest_held(engine)
    chats = [_prompt(3, seed) for seed in range(5)]
    for turn in range(2):
        first = turn * len(chats)
        requests = [request_of(first + i, chat, 40) for i, chat in enumerate(chats)]
        tokens = engine.run(*requests, stagger=1)
        for i, chat in enumerate(chats):
            _check(tiny, engine, first + i, chat, tokens[first + i])
            chats[i] = chat + tokens[first + i] + _prompt(5, seed=100 * turn + i)
    assert engine.engine.stats().preemptions


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_choices_of_one_prompt(
    family: str, caching: bool, tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny, prompt = tiny_model(family), _prompt(61)
    requests = [
        request_of(key, prompt, 30, sampling=Sampling(seed=key, temperature=1.2))
        for key in range(4)
    ]
    lone = served(tiny.folder, disable_hybrid_kv_cache_manager=True)
    assert lone.config.windows is None
    expected = {own.key: lone.run(own)[own.key] for own in requests}
    engine = served(tiny.folder, max_batch_tokens=16, prefix_caching=caching)
    _highest_held(engine)
    together = [requests[0], *(replace(own, parent_key=0) for own in requests[1:])]
    assert engine.run(*together) == expected


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_beams(family: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompt = tiny_model(family), _prompt(41)
    request = replace(request_of(0, prompt, 24), beams=BeamParams(width=3, length_penalty=1.0))
    whole = served(tiny.folder, disable_hybrid_kv_cache_manager=True)
    whole.run(request)
    engine = served(tiny.folder, max_batch_tokens=16)
    _highest_held(engine)
    engine.run(request)
    assert [one.tokens for one in engine.hypotheses[0]] == [
        one.tokens for one in whole.hypotheses[0]
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_that_are_taken_back(
    family: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """N-grams guess, mostly wrong; several steps in one call, two calls in flight."""
    tiny = tiny_model(family)
    engine = served(tiny.folder, spec_method="ngram", spec_tokens=5, max_lease=4, page_size=2)
    highest = _highest_held(engine)
    prompts = [_prompt(9) * 6, _prompt(50, seed=1)]
    tokens = engine.run(*(request_of(key, prompt, 40) for key, prompt in enumerate(prompts)))
    for key, prompt in enumerate(prompts):
        assert tokens[key] == tiny.greedy(prompt, 40)
    assert highest() <= engine.config.pages_of(47) + engine.config.pages_of(45)


def test_runners_that_die(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompt = tiny_model("gemma3_text"), _prompt(60)
    engine = served(tiny.folder, max_batch_tokens=16)
    engine.lose_runners(3, 9)
    tokens = engine.run(request_of(0, prompt, 20), request_of(1, prompt[:40], 20))
    assert engine.lost == 2
    for key, one in enumerate([prompt, prompt[:40]]):
        assert tokens[key] == tiny.greedy(one, 20)


@pytest.mark.parametrize(
    "setting",
    [
        {"disable_hybrid_kv_cache_manager": True},
        {"check_pages": True},
        {"scheduler": "v0"},
        {"preemption": "swap"},
        {"max_model_len": 8},
    ],
)
def test_what_keeps_pages_of_all_layers(
    setting: dict[str, Any], tiny_model: Make, engine_args: Make
) -> None:
    runner = ModelRunner(engine_args(tiny_model("gemma3_text").folder, **setting))
    facts, limits = runner.profile()
    assert facts.windows is None
    assert resolve(engine_args("x", **setting), facts, limits).windows is None


def test_the_same_bytes_hold_more(tiny_model: Make, engine_args: Make) -> None:
    """Two of three layers have a window of 8 tokens: at full length a third of the bytes."""
    folder = tiny_model("gemma3_text").folder
    capacities = []
    for disabled in (True, False):
        settings = {"disable_hybrid_kv_cache_manager": disabled, "max_decoding_batch": 64}
        args = engine_args(folder, kv_cache_memory=1 << 20, **settings, max_batch_tokens=64)
        capacities.append(resolve(args, *ModelRunner(args).profile()).capacity)
    assert capacities[1] > 1.5 * capacities[0]
