"""Decoders whose layers keep a state per request give transformers' own tokens."""

import importlib.util
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.config import resolve
from rayfin.actors.messages import BeamParams, Command, Sampling
from rayfin.actors.runner import checkpoint
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.models.replace import chunked_logits
from rayfin.kernels.cpu.library import try_load

EOS, MAX_TOKENS = 2, 10
FAMILIES = ("qwen3_next", "lfm2", "mamba", "mamba2", "zamba")
Make = Callable[..., Any]


def _prompts(lengths: tuple[int, ...] = (1, 4, 17, 33)) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(3, 128) for _ in range(length)] for length in lengths]


def _requests(request_of: Make, prompts: list[list[int]], count: int = MAX_TOKENS) -> list[Any]:
    return [request_of(key, prompt, count, eos=[EOS]) for key, prompt in enumerate(prompts)]


def _check(tiny: Any, prompts: list[list[int]], tokens: Any, count: int = MAX_TOKENS) -> None:
    for key, prompt in enumerate(prompts):
        assert tokens[key] == tiny.greedy(prompt, count), f"prompt of {len(prompt)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_with_chunks(family: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model(family), _prompts()
    for budget in (8, 16):
        engine = served(tiny.folder, max_batch_tokens=budget, max_model_len=64)
        _check(tiny, prompts, engine.run(*_requests(request_of, prompts), stagger=1))
        assert any(step.decoding_batch and step.prefill_batch for step in engine.steps)


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunks(chunk: int, tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model("qwen3_next"), _prompts((23, 17))
    engine = served(tiny.folder, long_prefill_token_threshold=chunk, max_model_len=64)
    _check(tiny, prompts, engine.run(*_requests(request_of, prompts)))


def test_whole_prompts(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model("qwen3_next"), _prompts()
    engine = served(tiny.folder, scheduler="v0", max_model_len=64)
    _check(tiny, prompts, engine.run(*_requests(request_of, prompts), stagger=1))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted(preemption: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model("qwen3_next"), _prompts((7, 8, 13, 16, 4, 11))
    engine = served(tiny.folder, num_pages=12, max_model_len=44, preemption=preemption)
    tokens = engine.run(*_requests(request_of, prompts, 28))
    assert engine.engine.stats().preemptions > 0
    _check(tiny, prompts, tokens, 28)


def test_preempted_at_each_step(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model("lfm2"), _prompts((9, 14, 5))
    engine = served(tiny.folder, max_model_len=64)
    lifecycle, step, turns = engine.engine.lifecycle, engine.engine.step, 0

    def preempts() -> Any:
        nonlocal turns
        turns += 1
        if turns % 4 == 0 and len(lifecycle.state.running):
            lifecycle.preempt(lifecycle.victim())
        return step()

    engine.engine.step = preempts
    _check(tiny, prompts, engine.run(*_requests(request_of, prompts)))


def test_forks(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Choices of one prompt, each with another seed, equal those that run alone."""
    tiny, prompt = tiny_model("qwen3_next"), _prompts((19,))[0]

    def choice(key: int, parent: int | None) -> Any:
        sampling = Sampling(temperature=1.0, seed=100 + key)
        return replace(request_of(key, prompt, MAX_TOKENS, sampling=sampling), parent_key=parent)

    engine = served(tiny.folder, max_model_len=64)
    together = engine.run(*(choice(key, 0 if key else None) for key in range(3)))
    for key in range(3):
        alone = served(tiny.folder, max_model_len=64).run(choice(key, None))
        assert together[key] == alone[key]


def test_beams(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompt = tiny_model("qwen3_next"), _prompts((19,))[0]
    engine = served(tiny.folder, max_model_len=64)
    engine.run(replace(request_of(0, prompt, MAX_TOKENS, eos=[EOS]), beams=BeamParams(3)))
    expected = tiny.model.generate(
        torch.tensor([prompt]), num_beams=3, max_new_tokens=MAX_TOKENS, do_sample=False
    )
    best = expected[0, len(prompt) :].tolist()
    assert engine.hypotheses[0][0].tokens == best


def test_failed_row_leaves_the_others(tiny_model: Make, served: Make, request_of: Make) -> None:
    """A step that fails is computed again row by row, from states that it has not changed."""
    tiny, prompts = tiny_model("qwen3_next"), _prompts((9, 14))
    engine = served(tiny.folder, max_model_len=64)
    forward, calls = engine._forward, 0  # what the harness has not wrapped

    def fails_sometimes(inputs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits: torch.Tensor = forward(inputs)
        if calls in (3, 6) and len(logits) > 1:
            raise ValueError("planted, behind all layers")
        return logits

    engine.runner._model.forward = fails_sometimes
    _check(tiny, prompts, engine.run(*_requests(request_of, prompts)))


def test_multi_step_calls(
    tiny_model: Make, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfin.actors.scheduler.policy.multi_step.CALL_SECONDS", 1e6)
    tiny, prompts = tiny_model("qwen3_next"), _prompts((9, 14))
    engine = served(tiny.folder, max_model_len=64, max_lease=4)
    _check(tiny, prompts, engine.run(*_requests(request_of, prompts)))
    assert max(step.num_steps for step in engine.steps) > 1


def test_states_are_off_the_page_budget(tiny_model: Make, engine_args: Make) -> None:
    """Pages count attention layers only; a model without any is limited by its slots alone."""
    runner = ModelRunner(engine_args(tiny_model("qwen3_next").folder))
    facts, limits = runner.profile()
    assert facts.page_bytes == 4 * 2 * 2 * 8 * 4  # one layer of two heads
    assert facts.state_bytes == 2 * (4 * 8 * 8 + (2 * 16 + 32) * 4) * 4
    args = engine_args(tiny_model("mamba").folder, max_model_len=40)
    facts, limits = ModelRunner(args).profile()
    assert facts.page_bytes == 0
    assert resolve(args, facts, limits).num_pages == 10 * limits.max_decoding_batch


def test_kernels_that_are_not_installed_are_named_on_a_gpu(
    tiny_model: Make,
    engine_args: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of layers that have some."""
    caplog.set_level(logging.INFO)
    cuda, lacks = torch.device("cuda"), {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for family in ("qwen3_next", "mamba2", "llama"):
        paged: Any = load(engine_args(tiny_model(family).folder, attention="torch")).decoder
        caplog.clear()
        checkpoint._suggest_kernels(paged, torch.device("cpu"))
        assert "hybrid" not in caplog.text
        checkpoint._suggest_kernels(paged, cuda)
        lacks[family] = "pip install 'rayfin[hybrid]'" in caplog.text
    assert lacks == {"qwen3_next": True, "mamba2": False, "llama": False}
    paged = load(engine_args(tiny_model("qwen3_next").folder, attention="torch")).decoder
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "fla" or None)
    assert not paged.recurrent.lacks_kernels


def test_restart_forgets_states(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompts = tiny_model("lfm2"), _prompts((9, 14))
    engine = served(tiny.folder, max_model_len=64)
    engine.engine.add(request_of(7, prompts[0], 4))
    while engine.engine.has_work:
        engine.engine.step()
    engine.engine.sleep()
    engine.engine.wake()
    _check(tiny, prompts, engine.run(*_requests(request_of, prompts)))
    assert np.all(engine.steps[-1].kv_len > 0)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba"])
def test_second_turn_starts_from_a_snapshot(
    family: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny, prompt = tiny_model(family), _prompts((85,))[0]
    engine = served(tiny.folder, max_model_len=128)
    first = engine.run(request_of(0, prompt, MAX_TOKENS))[0]
    turn = prompt + first + _prompts((6,))[0]
    _check(tiny, [turn], {0: engine.run(request_of(1, turn, MAX_TOKENS, eos=[EOS]))[1]})
    assert engine.cached[1] == 84
    engine.engine.carry_out(Command.RESET_CACHE)
    _check(tiny, [turn], {0: engine.run(request_of(2, turn, MAX_TOKENS, eos=[EOS]))[2]})
    assert engine.cached[2] == 0


def test_choices_start_from_their_parents_snapshot(
    tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny, prompt = tiny_model("qwen3_next"), _prompts((85,))[0]
    engine = served(tiny.folder, max_model_len=128, max_batch_tokens=16)
    choices = [
        replace(request_of(key, prompt, MAX_TOKENS, eos=[EOS]), parent_key=0 if key else None)
        for key in range(3)
    ]
    _check(tiny, [prompt] * 3, engine.run(*choices))
    assert engine.cached == {0: 0, 1: 84, 2: 84}


def test_few_snapshots_and_pages(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Snapshots and pages are replaced, requests preempted: tokens stay."""
    tiny = tiny_model("qwen3_next")
    shared = _prompts((80,))[0]
    prompts = [shared[: 80 - 4 * (key % 2)] + [3 + key] * (key % 5 + 1) for key in range(8)]
    engine = served(tiny.folder, max_model_len=100, num_pages=60)
    engine.engine.lifecycle.state.snapshots.__init__(2, 4)
    _check(tiny, prompts, engine.run(*_requests(request_of, prompts), stagger=2))
    assert any(engine.cached.values())


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "lfm2"])
def test_log_probabilities_have_the_same_bits_in_any_step(
    family: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """A token at a time, in chunks, and in a batch that others come into."""
    if try_load() is None:
        pytest.skip("the CPU kernels are not built")
    tiny, prompts = tiny_model(family), _prompts()
    sampling = Sampling(logprobs=3, prompt_logprobs=2)
    found = []
    for chunk, stagger in ((1, 0), (7, 0), (24, 2)):
        engine = served(tiny.folder, max_model_len=64, long_prefill_token_threshold=chunk)
        engine.run(
            *(request_of(key, own, 12, sampling=sampling) for key, own in enumerate(prompts)),
            stagger=stagger,
        )
        found.append((engine.logprobs, engine.prompt_logprobs))
    assert len(found[0][0]) == len(prompts)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_goes_on_from_the_state_before_it(
    family: str, tiny_model: Make, engine_args: Make
) -> None:
    """Logits right behind a cut are those of the whole prompt; they are wrong where it is lost."""
    tiny = tiny_model(family)
    model = load(engine_args(tiny.folder)).model
    for tokens in (torch.arange(3, 43), torch.tensor([5] * 40)):
        expected = tiny.logits(tokens.tolist())
        for cuts in ([0, 24, 40], [0, 1, 40], [0, 20, 21, 22, 40]):
            logits = chunked_logits(model, model, tokens, cuts)
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
