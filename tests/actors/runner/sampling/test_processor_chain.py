"""Rules on logits: against a plain loop and transformers; a slot forgets the one before."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.sampling.processor_chain import ProcessorChain

Make = Callable[..., Any]
VOCABULARY = 30
RICH = Sampling(
    presence_penalty=0.4,
    frequency_penalty=-0.3,
    repetition_penalty=1.4,
    logit_bias=((3, 5.0), (7, -100.0)),
    allowed=tuple(range(2, 25)),
    bad_words=((4,), (5, 6), (6, 5, 9)),
    banned=(8,),
    banned_until=12,
)


def reference(logits: list[float], own: Sampling, prompt: list[int], output: list[int]) -> Any:
    """vLLM's order, token by token."""
    out = list(logits)
    for token in range(VOCABULARY):
        if own.allowed and token not in own.allowed:
            out[token] = -np.inf
        for *head, last in own.bad_words:
            if token == last and output[len(output) - len(head) :] == head:
                out[token] = -np.inf
        if token in own.banned and len(prompt) + len(output) < own.banned_until:
            out[token] = -np.inf
        out[token] += sum(value for biased, value in own.logit_bias if biased == token)
        if token in prompt or token in output:
            factor = own.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        out[token] -= own.frequency_penalty * output.count(token)
        out[token] -= own.presence_penalty * (token in output)
    return out


def news(step_of: Make, row: Make, *new: NewRequest, finished: Sequence[int] = ()) -> Any:
    return step_of(row(0, [1]), new=new, finished=finished)


def introduce(
    slot: int, own: Sampling, prompt: list[int], output: Sequence[int] = ()
) -> NewRequest:
    history = np.array([*prompt, *output], np.int32) if own.needs_history else None
    return NewRequest(slot, own, 100, frozenset(), history, len(prompt))


def process(processors: ProcessorChain, logits: torch.Tensor, *rows: tuple[int, int]) -> Any:
    slots, positions = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return processors.process(logits, slots, positions)


@pytest.mark.parametrize(
    "own",
    [
        RICH,
        Sampling(presence_penalty=-1.0),
        Sampling(frequency_penalty=1.5),
        Sampling(repetition_penalty=0.7),
        Sampling(logit_bias=((2, -3.0),)),
        Sampling(allowed=(5,)),
        Sampling(bad_words=((1, 2, 3), (3,))),
        Sampling(banned=(1, 2), banned_until=5),
    ],
)
def test_against_a_loop(own: Sampling, step_of: Make, row: Make) -> None:
    """Tokens come one by one; a row without rules beside it stays as it was."""
    numbers = random.Random(1)
    processors = ProcessorChain(torch.device("cpu"))
    prompt, output = [5, 6, 9, 9], [5, 6, 5]
    processors.apply_diff(
        news(step_of, row, introduce(1, own, prompt, output), introduce(0, Sampling(), prompt))
    )
    for _ in range(12):
        logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(len(output)))
        before = logits.clone()
        changed = process(processors, logits, (0, 3), (1, len(prompt) + len(output)))
        expected = torch.tensor(reference(logits[1].tolist(), own, prompt, output))
        torch.testing.assert_close(changed[1], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(changed[0], before[0]) and torch.equal(logits, before)
        token = numbers.choice([1, 2, 3, 5, 6, 9])
        processors.accept(np.array([0, 1], np.int32), np.array([7, token], np.int32))
        output.append(token)
    processors.accept(np.array([1], np.int32), np.array([-1], np.int32))  # nothing was sampled
    after = process(processors, torch.zeros(1, VOCABULARY), (1, 50))
    expected = torch.tensor(reference([0.0] * VOCABULARY, replace(own, banned=()), prompt, output))
    torch.testing.assert_close(after[0], expected)


def test_as_transformers_has_them(step_of: Make, row: Make) -> None:
    prompt = [3, 4, 4, 9]
    words = ((7,), (4, 5))
    own = Sampling(repetition_penalty=1.7)
    processors = ProcessorChain(torch.device("cpu"))
    bad = Sampling(bad_words=words)
    processors.apply_diff(
        news(step_of, row, introduce(0, own, prompt), introduce(1, bad, [1], output=[3, 4]))
    )
    logits = torch.randn(2, VOCABULARY)
    changed = process(processors, logits, (0, 4), (1, 3))
    penalty = RepetitionPenaltyLogitsProcessor(1.7)
    torch.testing.assert_close(changed[:1], penalty(torch.tensor([prompt]), logits[:1].clone()))
    no_bad_words = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=0)
    assert torch.equal(changed[1:], no_bad_words(torch.tensor([[3, 4]]), logits[1:].clone()))


def test_a_slot_keeps_nothing_of_the_request_before(step_of: Make, row: Make) -> None:
    """I20."""
    used, fresh = (ProcessorChain(torch.device("cpu")) for _ in range(2))
    used.apply_diff(news(step_of, row, introduce(2, RICH, [5, 5, 9], [6, 5])))
    used.accept(np.array([2], np.int32), np.array([9], np.int32))
    for own in (RICH, Sampling(), Sampling(frequency_penalty=1.0)):
        for processors, finished in ((used, [2]), (fresh, [])):
            new = introduce(2, own, [1, 2])
            processors.apply_diff(news(step_of, row, new, finished=finished))
        logits = torch.randn(1, VOCABULARY)
        assert torch.equal(process(used, logits, (2, 2)), process(fresh, logits, (2, 2)))
    used.apply_diff(news(step_of, row, finished=[2]))
    assert len(used) == 0


def test_rules_with_nothing_to_say_copy_nothing(step_of: Make, row: Make) -> None:
    """A minimum length that is reached, a bad word that has not begun; slots without rules."""
    processors = ProcessorChain(torch.device("cpu"))
    logits = torch.randn(2, VOCABULARY)
    assert process(processors, logits, (0, 3), (1, 3)) is logits
    short = Sampling(banned=(1,), banned_until=5)
    word = Sampling(bad_words=((4, 5),))
    processors.apply_diff(news(step_of, row, introduce(0, short, [1]), introduce(1, word, [1])))
    assert process(processors, logits, (0, 5), (1, 2)) is logits
    assert process(processors, logits, (0, 4), (1, 2)) is not logits
    assert process(processors, logits, (3, 4), (2, 2)) is logits


def test_half_precision_is_processed_in_full(step_of: Make, row: Make) -> None:
    processors = ProcessorChain(torch.device("cpu"))
    processors.apply_diff(news(step_of, row, introduce(0, Sampling(logit_bias=((1, 0.01),)), [1])))
    logits = torch.full((1, VOCABULARY), 64.0, dtype=torch.bfloat16)
    assert process(processors, logits, (0, 1)).argmax() == 1


@pytest.mark.parametrize("num_steps", [1, 4])
def test_through_the_engine(
    num_steps: int, tiny_model: Make, served: Make, request_of: Make, step_of: Make, row: Make
) -> None:
    """With preemptions and without: a loop over transformers' logits picks the same tokens."""
    tiny = tiny_model("llama")
    sampling = Sampling(
        presence_penalty=0.5,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=((9, 1.0),),
        bad_words=((20,), (9, 9)),
    )
    prompts = {key: list(range(10 + key, 24 + key)) for key in range(3)}
    expected = {}
    for key, prompt in prompts.items():
        processors = ProcessorChain(torch.device("cpu"))
        output: list[int] = []
        for _ in range(18):
            processors.apply_diff(news(step_of, row, introduce(0, sampling, prompt, output)))
            logits = tiny.logits([*prompt, *output])[-1:]
            output.append(int(process(processors, logits, (0, 99)).argmax()))
        expected[key] = output
    for pages in (40, 12):
        engine = served(tiny.folder, num_pages=pages, max_model_len=40, max_lease=num_steps)
        engine.engine._multi_step.observe(0.001, 1)
        requests = [request_of(key, prompts[key], 18, sampling=sampling) for key in prompts]
        assert engine.run(*requests) == expected
        assert (engine.engine.stats().preemptions > 0) == (pages == 12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_fails_alone(
    temperature: float, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """In the middle of its output, when a bad word of two tokens is all that it could say."""
    tiny, prompt = tiny_model("llama"), [10, 11, 12]
    stuck = Sampling(temperature=temperature, allowed=(5,), bad_words=((5, 5),))
    engine = served(tiny.folder)
    tokens = engine.run(request_of(0, prompt, 8, sampling=stuck), request_of(1, prompt, 8))
    assert tokens[0] == [5] and engine.reasons[0] == "error"
    assert "no token is left" in engine.errors[0]
    assert tokens[1] == tiny.greedy(prompt, 8)


def test_crash_and_replay(tiny_model: Make, served: Make, request_of: Make) -> None:
    """New runners are sent what the old ones knew; each log probability is emitted once."""
    folder = tiny_model("llama").folder
    requests = [
        request_of(
            key,
            list(range(10 + key, 24 + key)),
            18,
            sampling=Sampling(
                temperature=0.9,
                seed=key,
                repetition_penalty=1.3,
                frequency_penalty=0.7,
                bad_words=((20,), (9, 9)),
                logprobs=2,
                prompt_logprobs=1,
            ),
        )
        for key in range(4)
    ]
    calm = served(folder, max_batch_tokens=16)
    expected = calm.run(*requests)
    engine = served(folder, max_batch_tokens=16)
    execute, calls = engine.runner.execute, 0

    def dies_sometimes(info: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (2, 5, 14, 15):
            raise RunnerGroupFailed("the runner died")
        return execute(info)

    engine.runner.execute = dies_sometimes
    assert engine.run(*requests) == expected
    assert engine.executor.epoch == 4
    for key in range(4):
        assert len(engine.logprobs[key]) == len(expected[key])
        assert sorted(engine.prompt_logprobs[key]) == list(range(1, 14))
        for mine, theirs in zip(engine.logprobs[key], calm.logprobs[key], strict=True):
            assert mine[0] == pytest.approx(theirs[0], abs=1e-4) and mine[2] == theirs[2]
