"""Decoders whose tokens choose their keys by an index give transformers' own tokens."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayfin.actors.messages import Sampling
from rayfin.actors.runner.cpu.packed_experts import PackedExpertsModule
from rayfin.actors.runner.cpu.packed_layers import PackedLinear
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.models import indexer
from rayfin.actors.runner.models.inspect_layers import gates_plainly, is_experts
from rayfin.actors.runner.parts.lora.reader import layer_sizes
from rayfin.kernels.cpu.library import try_load

MAX_TOKENS = 10
FAMILIES = ("deepseek_v32", "glm_moe_dsa")
Make = Callable[..., Any]


def _prompts(lengths: tuple[int, ...] = (1, 7, 8, 17, 33)) -> list[list[int]]:
    """Below and above the eight keys that a token of the tiny models chooses."""
    numbers = random.Random(0)
    return [[numbers.randrange(3, 128) for _ in range(length)] for length in lengths]


def _check(tiny: Any, prompts: list[list[int]], tokens: Any, count: int = MAX_TOKENS) -> None:
    for key, prompt in enumerate(prompts):
        assert tokens[key] == tiny.greedy(prompt, count), f"prompt of {len(prompt)}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [8, 64])
def test_mixed_with_chunks(
    family: str, budget: int, tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny, prompts = tiny_model(family), _prompts()
    engine = served(tiny.folder, max_batch_tokens=budget, max_model_len=64)
    requests = [request_of(key, own, MAX_TOKENS, eos=[2]) for key, own in enumerate(prompts)]
    _check(tiny, prompts, engine.run(*requests, stagger=1))


def test_few_scores_at_once(
    tiny_model: Make, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts and many rows are scored in pieces."""
    monkeypatch.setattr(indexer, "SCORES_AT_ONCE", 2000)
    tiny, prompts = tiny_model("deepseek_v32"), _prompts()
    engine = served(tiny.folder, max_model_len=64)
    requests = [request_of(key, own, MAX_TOKENS, eos=[2]) for key, own in enumerate(prompts)]
    _check(tiny, prompts, engine.run(*requests))


def test_second_turn_hits_the_prefix(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Pages of a prefix hold the index's keys too."""
    tiny, prompt = tiny_model("deepseek_v32"), _prompts((40,))[0]
    engine = served(tiny.folder, max_model_len=128)
    first = engine.run(request_of(0, prompt, MAX_TOKENS))[0]
    turn = prompt + first + [5, 6, 7]
    tokens = engine.run(request_of(1, turn, MAX_TOKENS, eos=[2]))[1]
    assert engine.cached[1] >= 40
    assert tokens == tiny.greedy(turn, MAX_TOKENS)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted(preemption: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model("deepseek_v32"), _prompts((7, 8, 13, 16, 4, 11))
    engine = served(tiny.folder, num_pages=12, max_model_len=44, preemption=preemption)
    requests = [request_of(key, own, 28, eos=[2]) for key, own in enumerate(prompts)]
    tokens = engine.run(*requests)
    assert engine.engine.stats().preemptions > 0
    _check(tiny, prompts, tokens, 28)


def test_choices_of_one_prompt(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompt = tiny_model("glm_moe_dsa"), _prompts((19,))[0]

    def choice(key: int, parent: int | None) -> Any:
        sampling = Sampling(temperature=1.0, seed=100 + key)
        return replace(request_of(key, prompt, MAX_TOKENS, sampling=sampling), parent_key=parent)

    engine = served(tiny.folder, max_model_len=64)
    together = engine.run(*(choice(key, 0 if key else None) for key in range(3)))
    for key in range(3):
        alone = served(tiny.folder, max_model_len=64).run(choice(key, None))
        assert together[key] == alone[key]


def test_pages_hold_the_index(tiny_model: Make, served: Make) -> None:
    """A layer's index is one more key of a token: half with the keys, half with values."""
    layouts = served(tiny_model("glm_moe_dsa").folder).runner._model.layouts
    sizes = [(own.kv_heads, own.key_dim, own.value_dim) for own in layouts]
    assert sizes[0] == sizes[3] == (1, 8, 8)  # the second layer shares the choice of the first
    assert len(sizes) == 5


def test_pages_of_16_bits(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Keys of the index are rounded with the others, in chunks and as a whole alike."""
    tiny, prompt = tiny_model("deepseek_v32"), _prompts((20,))[0]
    settings = {"max_model_len": 64, "kv_cache_dtype": "bfloat16"}
    engines = [served(tiny.folder, max_batch_tokens=budget, **settings) for budget in (8, 64)]
    one, two = (engine.run(request_of(0, prompt, MAX_TOKENS))[0] for engine in engines)
    assert one == two


def test_compiled_kernels_take_its_layers(tiny_model: Make, served: Make, request_of: Make) -> None:
    if try_load() is None:
        pytest.skip("the CPU kernels are not built")
    tiny, prompts = tiny_model("deepseek_v32"), _prompts((5, 20))
    for settings in ({}, {"quantization": "int4"}):
        engine = served(tiny.folder, max_model_len=64, **settings)
        model = engine.runner._model.transformer
        kinds = {type(own) for own in model.modules()}
        assert {PackedLinear, PackedExpertsModule} <= kinds and torch.nn.Linear not in kinds
        requests = [request_of(key, own, MAX_TOKENS, eos=[2]) for key, own in enumerate(prompts)]
        tokens = engine.run(*requests)
        if not settings:
            _check(tiny, prompts, tokens)


def test_ngrams_are_not_the_default(tiny_model: Make, engine_args: Make) -> None:
    """A long row's last bits may depend on the rows beside it, as torch computes them."""
    facts, _ = ModelRunner(engine_args(tiny_model("deepseek_v32").folder)).profile()
    assert not facts.fixed_bits


def test_adapters_of_an_index_are_refused(tiny_model: Make) -> None:
    sizes = layer_sizes(tiny_model("glm_moe_dsa").model)
    assert sizes and not any("indexer" in path for path in sizes)


def test_drafts(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Rows of several tokens, below and above what a token chooses."""
    tiny = tiny_model("deepseek_v32")
    prompts = [[5, 6, 7, 8] * 2, [9, 3, 4] * 9]
    engine = served(tiny.folder, max_model_len=64, spec_method="ngram", spec_tokens=3)
    requests = [request_of(key, own, 20, eos=[2]) for key, own in enumerate(prompts)]
    _check(tiny, prompts, engine.run(*requests), 20)


def test_clamped_gates_are_not_plain(tiny_models: Any, tmp_path: Path) -> None:
    """Hunyuan 4's experts have the usual weights, and clamp what others do not."""
    model = tiny_models.make_tiny_model("hy_v4", tmp_path / "hy", 0)
    found = [own for own in model.modules() if is_experts(own)]
    assert found and not any(gates_plainly(own) for own in found)
    plain = tiny_models.make_tiny_model("deepseek_v32", tmp_path / "deepseek", 0)
    assert all(gates_plainly(own) for own in plain.modules() if is_experts(own))
