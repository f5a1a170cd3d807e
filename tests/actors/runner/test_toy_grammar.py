"""A grammar in one file: a logits processor whose allowed tokens are a hash of the history."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfin.actors.config import resolve
from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner, RunnerPlugins
from rayfin.actors.runner.sampling.device_rules import DeviceRules
from rayfin.actors.runner.sampling.processor import Rows
from rayfin.actors.scheduler.engine import Engine

Make = Callable[..., Any]
GRAMMAR = "grammar:toy"
PROMPTS = [[5, 9, 3, 5, 9, 3], [7, 7, 60, 2, 44, 31, 8, 17, 90], [11, 12]]
OUTPUT = 16


def allowed(history: list[int], vocabulary: int) -> torch.Tensor:
    """A third of the vocabulary, another one after each token."""
    generator = torch.Generator().manual_seed(hash(tuple(history)) % 2**31)
    return torch.rand(vocabulary, generator=generator) < 1 / 3


class ToyGrammar:
    def __init__(self, device: torch.device) -> None:
        self._histories: dict[int, list[int]] = {}

    def add(self, slot: int, request: NewRequest) -> bool:
        if GRAMMAR not in request.extra_keys:
            return False
        assert request.history is not None
        self._histories[slot] = request.history.tolist()
        return True

    def remove(self, slot: int) -> None:
        del self._histories[slot]

    def is_active(self, slot: int, position: int) -> bool:
        assert position == len(self._histories[slot])
        return True

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        for row, slot in zip(rows.index, rows.slots, strict=True):
            logits[row, ~allowed(self._histories[slot], logits.shape[1])] = -torch.inf

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        self._histories[slot] += tokens

    def rollback(self, slot: int, count: int) -> None:
        del self._histories[slot][-count:]

    def device_rules(self, slot: int) -> DeviceRules | None:
        return None


def oracle(tiny: Any, prompt: list[int], guided: bool) -> list[int]:
    history = list(prompt)
    for _ in range(OUTPUT):
        logits = tiny.logits(history)[-1].clone()
        if guided:
            logits[~allowed(history, len(logits))] = -torch.inf
        history.append(int(logits.argmax()))
    return history[len(prompt) :]


@pytest.mark.parametrize(("num_steps", "num_pages"), [(1, 40), (4, 40), (1, 10)])
def test_output_follows_the_grammar(
    num_steps: int, num_pages: int, tiny_model: Make, engine_args: Make, request_of: Make
) -> None:
    """Beside a row without one; step by step, in one call, and after preemptions."""
    tiny = tiny_model("llama")
    args = engine_args(tiny.folder, max_lease=num_steps)
    runner = ModelRunner(args, plugins=RunnerPlugins(processors=(ToyGrammar,)))
    config = replace(resolve(args, *runner.profile()), send_history=True, num_pages=num_pages)
    engine = Engine(config, InlineExecutor(runner, config))
    engine._multi_step.observe(0.001, 1)
    tokens: dict[int, list[int]] = {key: [] for key in range(len(PROMPTS))}
    for key, prompt in enumerate(PROMPTS):
        request = request_of(key, prompt, OUTPUT, sampling=Sampling())
        request.extra_keys = (GRAMMAR,) if key else ()
        engine.add(request)
    while engine.has_work:
        for deltas in engine.step().values():
            for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                tokens[key].append(token)
    assert tokens == {key: oracle(tiny, prompt, key > 0) for key, prompt in enumerate(PROMPTS)}
    assert bool(engine.stats().preemptions) == (num_pages == 10)
