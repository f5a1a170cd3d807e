"""Log probabilities through the engine equal the log-softmax of transformers' own logits."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rayfin.actors.messages import Sampling

Make = Callable[..., Any]
TOLERANCE = 1e-4


def _prompt(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 128) for _ in range(length)]


def _check(entry: Any, row: torch.Tensor, token: int, k: int) -> None:
    """An entry against the log-softmax [V] that transformers has in its place."""
    own, rank, ids, values = entry
    assert abs(own - float(row[token])) < TOLERANCE
    assert abs(rank - 1 - int((row > row[token]).sum())) <= int(
        ((row - row[token]).abs() < TOLERANCE).sum()
    )
    best = row.topk(k)
    assert torch.allclose(torch.tensor(values[:k]), best.values, atol=TOLERANCE)
    for token_id, value in zip(ids[:k], values[:k], strict=True):
        assert abs(value - float(row[token_id])) < TOLERANCE


def _check_tokens(engine: Any, tiny: Any, key: int, prompt: Sequence[int], tokens: Any) -> None:
    expected = tiny.logits([*prompt, *tokens]).log_softmax(-1)
    entries = engine.logprobs[key]
    assert len(entries) == len(tokens)
    for index, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        _check(entry, expected[len(prompt) + index - 1], token, 4)


@pytest.mark.parametrize("num_steps", [1, 5])
@pytest.mark.parametrize("scheduler", ["v0", "v1"])
def test_of_sampled_tokens(
    num_steps: int, scheduler: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Beside requests that ask for none, or fewer; chunked, leased, temperature does not matter."""
    tiny = tiny_model("llama")
    engine = served(tiny.folder, max_lease=num_steps, scheduler=scheduler)
    engine.engine._multi_step.observe(0.001, 1)
    prompts = {key: _prompt(key, 7 + 9 * key) for key in range(4)}
    requests = [
        request_of(0, prompts[0], 9, sampling=Sampling(logprobs=4)),
        request_of(1, prompts[1], 12),
        request_of(2, prompts[2], 7, sampling=Sampling(temperature=1.5, seed=3, logprobs=4)),
        request_of(3, prompts[3], 5, sampling=Sampling(logprobs=0)),
    ]
    tokens = engine.run(*requests)
    for key in (0, 2):
        _check_tokens(engine, tiny, key, prompts[key], tokens[key])
    assert 1 not in engine.logprobs
    assert len(engine.logprobs[3]) == 5
    assert any(step.num_steps > 1 for step in engine.steps) == (num_steps > 1)


def test_preempted_and_from_the_prefix_cache(
    tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Each token's log probability is emitted once, and equals the oracle's."""
    tiny = tiny_model("llama")
    engine = served(tiny.folder, num_pages=12, max_model_len=40)
    shared = _prompt(1, 9)
    prompts = {key: [*shared, *_prompt(key, 6)] for key in range(3)}
    sampling = Sampling(logprobs=4)
    tokens = engine.run(*(request_of(key, prompts[key], 20, sampling=sampling) for key in prompts))
    assert engine.engine.stats().preemptions > 0 and engine.engine.stats().prefix_hits > 0
    for key in prompts:
        _check_tokens(engine, tiny, key, prompts[key], tokens[key])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_of_a_prompt(preemption: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    """All positions but the first, once, also in chunks, preempted, beside a cached twin."""
    tiny = tiny_model("llama")
    settings = {"num_pages": 12, "max_model_len": 40, "max_batch_tokens": 8}
    engine = served(tiny.folder, preemption=preemption, **settings)
    prompt = _prompt(5, 21)
    scored = Sampling(prompt_logprobs=4, logprobs=4)
    tokens = engine.run(
        request_of(0, prompt, 15),
        request_of(1, prompt, 15, sampling=scored),
        request_of(2, _prompt(6, 20), 15, sampling=scored),
        request_of(3, _prompt(7, 9), 1, sampling=scored),
        stagger=3,
    )
    assert engine.engine.stats().preemptions > 0
    assert engine.cached[1] == 0
    expected = tiny.logits(prompt).log_softmax(-1)
    assert sorted(engine.prompt_logprobs[1]) == list(range(1, 21))
    for position, entry in engine.prompt_logprobs[1].items():
        _check(entry, expected[position - 1], prompt[position], 4)
    _check_tokens(engine, tiny, 1, prompt, tokens[1])
    assert 0 not in engine.prompt_logprobs
    assert len(engine.prompt_logprobs[2]) == 19 and len(engine.prompt_logprobs[3]) == 8


@pytest.mark.parametrize("num_steps", [1, 5])
def test_of_tokens_that_a_request_names(
    num_steps: int, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """In its order, whatever the likeliest are; beside requests that want those."""
    tiny = tiny_model("llama")
    engine = served(tiny.folder, max_lease=num_steps)
    engine.engine._multi_step.observe(0.001, 1)
    named = (90, 3, 17, 4, 5)
    prompts = {key: _prompt(key, 7 + 9 * key) for key in range(3)}
    tokens = engine.run(
        request_of(0, prompts[0], 6, sampling=Sampling(logprobs=0, logprob_ids=named)),
        request_of(1, prompts[1], 6, sampling=Sampling(logprobs=4)),
        request_of(2, prompts[2], 6, sampling=Sampling(logprobs=0, logprob_ids=named[:2])),
    )
    _check_tokens(engine, tiny, 1, prompts[1], tokens[1])
    for key, ids in ((0, named), (2, named[:2])):
        rows = tiny.logits([*prompts[key], *tokens[key]]).log_softmax(-1)[len(prompts[key]) - 1 :]
        for (own, _, got, values), row, token in zip(
            engine.logprobs[key], rows, tokens[key], strict=False
        ):
            count = len(ids)  # what follows is padding
            assert tuple(got[:count]) == ids and set(got[count:]) <= {-1}
            assert abs(own - float(row[token])) < TOLERANCE
            assert torch.allclose(torch.tensor(values[:count]), row[list(ids)], atol=TOLERANCE)


def test_all_of_the_vocabulary(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny = tiny_model("llama")
    engine = served(tiny.folder)
    prompt = _prompt(2, 6)
    vocabulary = engine.config.vocab_size
    engine.run(request_of(0, prompt, 1, sampling=Sampling(logprobs=vocabulary)))
    ((_, rank, ids, values),) = engine.logprobs[0]
    assert rank == 1 and sorted(ids) == list(range(vocabulary))
    assert values == sorted(values, reverse=True)
    assert abs(sum(torch.tensor(values).exp()) - 1) < TOLERANCE
