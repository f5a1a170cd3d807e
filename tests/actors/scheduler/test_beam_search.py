"""Beam search against transformers' own, sequence by sequence and score by score."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.messages import BeamParams, Hypothesis
from rayfin.actors.scheduler.beam_search import BeamSearch, Continuation, candidates_per_beam

pytestmark = pytest.mark.slow(reason="compares with transformers' own beam search")

Make = Callable[..., Any]
VOCAB = 128


def _prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 9))]


def _ours(
    model: Any, prompt: Sequence[int], params: BeamParams, eos: Sequence[int], max_tokens: int
) -> list[Hypothesis]:
    """The search driven by plain forwards over whole contexts: no cache, no engine."""
    search = BeamSearch(params, frozenset(eos), max_tokens)
    most = min(candidates_per_beam(params.width, len(eos)), VOCAB)
    while not search.over:
        contexts = torch.tensor([[*prompt, *beam] for beam in search.beams])
        with torch.inference_mode():
            logits = model(contexts, use_cache=False).logits[:, -1].float()
        top = logits.log_softmax(-1).topk(most)
        before = search.beams
        step = search.advance(top.indices.numpy().astype(np.int32), top.values.numpy())
        if not search.over:
            steps = zip(step.parents, step.tokens, strict=True)
            assert search.beams == [[*before[p], t] for p, t in steps]
    return search.hypotheses


def _theirs(
    model: Any, prompt: Sequence[int], params: BeamParams, eos: Sequence[int], max_tokens: int
) -> list[tuple[list[int], float]]:
    """What ``generate`` says: (tokens, score), padding cut off behind the first end."""
    output = model.generate(
        torch.tensor([list(prompt)]),
        num_beams=params.width,
        num_return_sequences=params.width,
        do_sample=False,
        max_new_tokens=max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    found = []
    for sequence, score in zip(
        output.sequences[:, len(prompt) :].tolist(), output.sequences_scores.tolist(), strict=True
    ):
        ends = [i + 1 for i, token in enumerate(sequence) if token in eos]
        found.append((sequence[: ends[0]] if ends else sequence, score))
    return found


def _check(model: Any, seed: int, params: BeamParams, num_eos: int) -> list[Hypothesis]:
    draw = random.Random(1000 + seed)
    prompt, max_tokens = _prompt(seed), draw.choice([1, 2, 5, 12, 20])
    eos = draw.sample(range(1, VOCAB), num_eos)
    ours = _ours(model, prompt, params, eos, max_tokens)
    theirs = _theirs(model, prompt, params, eos, max_tokens)
    assert [own.tokens for own in ours] == [tokens for tokens, _ in theirs]
    scores = [own.score for own in ours]
    np.testing.assert_allclose(scores, [score for _, score in theirs], atol=1e-5, rtol=1e-5)
    for own in ours:
        assert own.finish_reason == ("stop" if own.tokens[-1] in eos else "length")
    return ours


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0, 0.6, 2.0])
def test_equals_transformers(tiny_model: Make, penalty: float, early_stopping: bool | str) -> None:
    """Every width from 2 to 8, with none, one and many tokens that end."""
    model = tiny_model("llama").model
    reasons = set()
    for seed, (width, num_eos) in enumerate(itertools.product(range(2, 9), (0, 1, 3, 30))):
        params = BeamParams(width, penalty, early_stopping)  # type: ignore[arg-type]
        reasons |= {own.finish_reason for own in _check(model, seed, params, num_eos)}
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "mixtral"])
def test_equals_transformers_on_other_models(tiny_model: Make, family: str) -> None:
    model = tiny_model(family).model
    for seed in range(12):
        _check(model, 100 + seed, BeamParams(2 + seed % 7), [0, 1, 20][seed % 3])


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_one_beam_is_greedy(tiny_model: Make, early_stopping: Any) -> None:
    tiny = tiny_model("llama")
    for seed in range(8):
        prompt = _prompt(seed)
        (own,) = _ours(tiny.model, prompt, BeamParams(1, 1.0, early_stopping), [2], 12)
        assert own.tokens == tiny.greedy(prompt, 12)


def _rows(*rows: dict[int, float]) -> tuple[Any, Any]:
    ids = np.array([list(row) for row in rows], np.int32)
    return ids, np.array([list(row.values()) for row in rows], np.float32)


def test_first_step_splits_the_prompt() -> None:
    search = BeamSearch(BeamParams(2), {9}, 5)
    assert search.advance(*_rows({4: -1, 9: -2, 7: -3})) == Continuation([0, 0], [4, 7])
    assert [(own.tokens, own.score) for own in search.hypotheses] == [([9], -2.0)]


def test_a_stop_token_outside_the_best_is_not_kept() -> None:
    search = BeamSearch(BeamParams(2), {9}, 5)
    assert search.advance(*_rows({4: -1, 5: -2, 9: -3})) == Continuation([0, 0], [4, 5])
    assert search.hypotheses == []


def test_one_beam_may_have_all_children() -> None:
    search = BeamSearch(BeamParams(2), set(), 5)
    search.advance(*_rows({4: -1, 5: -9}))
    assert search.advance(*_rows({1: -1, 2: -2}, {1: -1, 2: -2})) == Continuation([0, 0], [1, 2])
    assert search.beams == [[4, 1], [4, 2]]


def test_ties_go_to_the_beam_and_the_token_that_come_first() -> None:
    search = BeamSearch(BeamParams(2), set(), 5)
    assert search.advance(*_rows({6: -1, 3: -1, 1: -1})) == Continuation([0, 0], [6, 3])
    assert search.advance(*_rows({8: -1, 2: -1}, {1: -1, 0: -1})) == Continuation([0, 0], [8, 2])


def test_a_stop_token_at_the_last_step_is_a_stop() -> None:
    search = BeamSearch(BeamParams(2, length_penalty=0.0), {9}, 1)
    assert search.advance(*_rows({4: -1, 9: -2, 7: -3})) == Continuation([], [])
    assert search.over and search.beams == []
    assert [own.finish_reason for own in search.hypotheses] == ["length", "stop"]


def test_a_vocabulary_smaller_than_the_width() -> None:
    search = BeamSearch(BeamParams(4), {2}, 3)
    assert search.advance(*_rows({1: -1, 2: -2, 0: -3})) == Continuation([0, 0], [1, 0])
    assert len(search.advance(*_rows(*[{1: -1, 2: -2, 0: -3}] * 2)).parents) == 4
    while not search.over:
        search.advance(*_rows(*[{1: -1, 2: -2, 0: -3}] * len(search.beams)))
    assert len(search.hypotheses) == 4


def test_a_vocabulary_of_stop_tokens() -> None:
    search = BeamSearch(BeamParams(4), {0, 1}, 3)
    assert search.advance(*_rows({1: -1, 0: -2})) == Continuation([], [])
    assert [own.tokens for own in search.hypotheses] == [[1], [0]]


@pytest.mark.parametrize("seed", range(20))
def test_so_many_candidates_are_enough(seed: int) -> None:
    """``candidates_per_beam`` tokens of each row decide as the whole vocabulary does."""
    draw = np.random.default_rng(seed)
    width, stops = int(draw.integers(1, 6)), set(draw.choice(40, draw.integers(0, 9)).tolist())
    few, all_of = (BeamSearch(BeamParams(width), stops, 8) for _ in range(2))
    most = candidates_per_beam(width, len(stops))
    while not all_of.over:
        scores = np.log(draw.dirichlet(np.full(40, 0.3), len(all_of.beams)) + 1e-9)
        ids = np.argsort(-scores, axis=1, kind="stable").astype(np.int32)
        values = np.take_along_axis(scores, ids, 1).astype(np.float32)
        expected = all_of.advance(ids, values)
        assert few.advance(ids[:, :most], values[:, :most]) == expected
        assert few.hypotheses == all_of.hypotheses and few.over == all_of.over
