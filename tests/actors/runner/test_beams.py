"""Beam search on real models through the engine: transformers' own, whatever goes on around it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.messages import BeamParams, Hypothesis

pytestmark = pytest.mark.slow(reason="searches with many models")

Make = Callable[..., Any]
EOS = (2, 40, 77, 90, 101)


def _prompt(length: int) -> list[int]:
    numbers = random.Random(length)
    return [numbers.randrange(3, 128) for _ in range(length)]


def _search(request_of: Make, key: int, length: int, beams: BeamParams, tokens: int = 10) -> Any:
    return replace(request_of(key, _prompt(length), tokens, eos=EOS), beams=beams)


def _theirs(tiny: Any, request: Any) -> list[tuple[list[int], float]]:
    prompt, beams = request.prompt.tolist(), request.beams
    output = tiny.model.generate(
        torch.tensor([prompt]),
        num_beams=beams.width,
        num_return_sequences=beams.width,
        do_sample=False,
        max_new_tokens=request.stopping.max_tokens,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        eos_token_id=list(EOS),
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    found = []
    for sequence, score in zip(
        output.sequences[:, len(prompt) :].tolist(), output.sequences_scores.tolist(), strict=True
    ):
        ends = [i + 1 for i, token in enumerate(sequence) if token in EOS]
        found.append((sequence[: ends[0]] if ends else sequence, score))
    return found


def _check(tiny: Any, engine: Any, requests: Sequence[Any]) -> None:
    for request in requests:
        ours: list[Hypothesis] = engine.hypotheses[request.key]
        theirs = _theirs(tiny, request)
        assert [own.tokens for own in ours] == [tokens for tokens, _ in theirs]
        scores = [own.score for own in ours]
        np.testing.assert_allclose(scores, [score for _, score in theirs], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheduler", ["v0", "v1"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_equals_transformers(
    family: str, page_size: int, scheduler: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Several searches at once, prompts in chunks, longer than the sliding windows."""
    tiny = tiny_model(family)
    engine = served(tiny.folder, page_size=page_size, scheduler=scheduler, max_batch_tokens=10)
    requests = [
        _search(request_of, 0, 1, BeamParams(4)),
        _search(request_of, 1, 17, BeamParams(3, 0.0, "never")),
        _search(request_of, 2, 21, BeamParams(8, 2.0, True)),
        _search(request_of, 3, 8, BeamParams(2, -1.0)),
        request_of(4, _prompt(9), 10, eos=[2]),
    ]
    tokens = engine.run(*requests)
    _check(tiny, engine, requests[:4])
    assert tokens[4] == tiny.greedy(_prompt(9), 10) and tokens[0] == []


@pytest.mark.parametrize("width", range(2, 9))
def test_widths(width: int, tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny = tiny_model("llama")
    engine = served(tiny.folder)
    requests = [
        _search(request_of, key, 5 + key, BeamParams(width, penalty, early), 14)
        for key, (penalty, early) in enumerate([(1.0, False), (0.5, True), (1.5, "never")])
    ]
    engine.run(*requests, stagger=2)
    _check(tiny, engine, requests)


def test_greedy_is_a_search_of_one_beam(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny = tiny_model("llama")
    engine = served(tiny.folder)
    engine.run(replace(request_of(0, _prompt(9), 12, eos=[2]), beams=BeamParams(1)))
    assert engine.hypotheses[0][0].tokens == tiny.greedy(_prompt(9), 12)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_in_the_middle(
    caching: bool, tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny = tiny_model("llama")
    engine = served(tiny.folder, num_pages=18, max_model_len=40, prefix_caching=caching)
    older = request_of(0, _prompt(6), 30, eos=[2])
    requests = [_search(request_of, key, 9, BeamParams(3), 14) for key in (1, 2)]
    tokens = engine.run(older, *requests)
    assert engine.engine.stats().preemptions > 0
    _check(tiny, engine, requests)
    assert tokens[0] == tiny.greedy(_prompt(6), 30)


def test_new_runner_in_the_middle(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny = tiny_model("llama")
    engine = served(tiny.folder)
    submit, fails = engine.executor.submit, [6]

    def failing(info: Any) -> Any:
        if info.epoch == 0 and info.step == fails[0]:
            raise RunnerGroupFailed("the runner is gone")
        return submit(info)

    engine.executor.submit = failing
    requests = [_search(request_of, key, 9 + key, BeamParams(4)) for key in (1, 2)]
    engine.run(*requests)
    assert engine.executor.epoch == 1
    _check(tiny, engine, requests)
