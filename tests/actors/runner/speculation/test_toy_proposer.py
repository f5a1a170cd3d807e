"""A proposer in one file: n-grams; its drafts are verified in one forward and change no token."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayfin.actors.config import resolve
from rayfin.actors.messages import Int32Array, Int64Array, NewRequest, Sampling, SchedulerInfo
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner, RunnerPlugins
from rayfin.actors.runner.speculation.interface import Drafts
from rayfin.actors.scheduler.engine import Engine

Make = Callable[..., Any]
PROMPTS = [[5, 9, 3, 5, 9, 3, 5, 9], [7, 7, 60, 2, 44, 31, 8, 17, 90], [11, 12]]
OUTPUT = 20


class NGrams:
    """What came after the last occurrence of the last token; else a wrong guess."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def add(self, slot: int, request: NewRequest) -> None:
        assert request.history is not None
        self.tokens[slot] = request.history.tolist()

    def remove(self, slot: int) -> None:
        del self.tokens[slot]

    def accept(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        for slot, row, count in zip(slots.tolist(), tokens, counts.tolist(), strict=True):
            self.tokens[slot] += row[:count].tolist()

    def propose(self, slots: Int64Array, room: Int64Array) -> Drafts:
        tokens = np.zeros((len(slots), int(room.max())), np.int32)
        lengths = np.zeros(len(slots), np.int64)
        for row, (slot, most) in enumerate(zip(slots.tolist(), room.tolist(), strict=True)):
            guess = self._guess(self.tokens[slot])[:most]
            tokens[row, : len(guess)], lengths[row] = guess, len(guess)
        return Drafts(tokens, lengths)

    def _guess(self, known: list[int]) -> list[int]:
        for start in range(len(known) - 2, -1, -1):
            if known[start] == known[-1]:
                return known[start + 1 :]
        return [1, 2]


class Oracle(NGrams):
    """Reads the future: all of its drafts are right."""

    streams: list[list[int]] = []

    def _guess(self, known: list[int]) -> list[int]:
        stream = next(own for own in self.streams if own[: len(known)] == known)
        return stream[len(known) :]


def run(
    args: Any, requests: list[Any], drafts: int, proposer: Any = None, num_pages: int | None = None
) -> tuple[dict[int, list[int]], list[SchedulerInfo], Any]:
    args = replace(args, spec_method="none")  # the tests set how many tokens are drafted
    runner = ModelRunner(args, plugins=RunnerPlugins(proposer=proposer))
    config = resolve(args, *runner.profile())
    pages = num_pages or config.num_pages
    config = replace(config, num_speculative_tokens=drafts, num_pages=pages)
    executor = InlineExecutor(runner, config)
    engine = Engine(config, executor)
    steps: list[SchedulerInfo] = []
    submit = executor.submit
    executor.submit = lambda info: (steps.append(info), submit(info))[1]  # type: ignore
    tokens: dict[int, list[int]] = {request.key: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for deltas in engine.step().values():
            assert not any(ended.error for ended in deltas.ended)
            for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                tokens[key].append(token)
    engine.check_integrity()
    return tokens, steps, engine


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("drafts", [1, 3])
def test_tokens_are_those_without_drafts(
    sampling: dict[str, float], drafts: int, tiny_model: Make, engine_args: Make, request_of: Make
) -> None:
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24)
    requests = [
        request_of(key, prompt, OUTPUT, sampling=Sampling(**sampling, seed=key))  # type: ignore
        for key, prompt in enumerate(PROMPTS)
    ]
    expected, plain, _ = run(args, requests, 0)
    actual, steps, _ = run(args, requests, drafts, NGrams)
    assert actual == expected
    assert len(steps) <= len(plain) and all(step.grants is None for step in plain)


def test_right_drafts_save_steps(tiny_model: Make, engine_args: Make, request_of: Make) -> None:
    tiny = tiny_model("llama")
    args = engine_args(tiny.folder, max_decoding_batch=24)
    requests = [request_of(key, prompt, OUTPUT) for key, prompt in enumerate(PROMPTS)]
    expected, plain, _ = run(args, requests, 0)
    Oracle.streams = [[*PROMPTS[key], *tokens] for key, tokens in expected.items()]
    actual, steps, _ = run(args, requests, 4, Oracle)
    assert actual == expected == {k: tiny.greedy(p, OUTPUT) for k, p in enumerate(PROMPTS)}
    assert len(steps) < len(plain) / 2


def test_short_of_pages(tiny_model: Make, engine_args: Make, request_of: Make) -> None:
    """Drafts are taken back and requests preempted; stop tokens end a row within its drafts."""
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24, check_pages=True)
    drawn = Sampling(temperature=1.0, seed=3)
    requests = [request_of(k, p, OUTPUT, sampling=drawn) for k, p in enumerate(PROMPTS)]
    free, _, _ = run(args, requests, 0)
    requests = [
        request_of(k, p, OUTPUT, sampling=drawn, eos=[free[k][15]]) for k, p in enumerate(PROMPTS)
    ]
    expected, _, _ = run(args, requests, 0)
    actual, _, engine = run(args, requests, 3, NGrams, num_pages=9)
    assert actual == expected != free and engine.stats().preemptions
