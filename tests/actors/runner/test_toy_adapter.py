"""An adapter in one file: a vector for each row, by its request, is added to the logits."""

from collections.abc import Callable
from typing import Any

import torch

from rayfin.actors.config import resolve
from rayfin.actors.messages import SchedulerInfo
from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner, RunnerPlugins
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.observers import Observer
from rayfin.actors.scheduler.engine import Engine

Make = Callable[..., Any]
PROMPTS = [[5, 9, 3, 5, 9, 3], [5, 9, 3, 5, 9, 3], [7, 7, 60, 2, 44], [11, 12]]
ADAPTERS = ["", "adapter:1", "adapter:2", "adapter:1"]
OUTPUT = 12


def vector(adapter: str, vocabulary: int) -> torch.Tensor:
    if not adapter:
        return torch.zeros(vocabulary)
    generator = torch.Generator().manual_seed(int(adapter[-1]))
    return torch.randn(vocabulary, generator=generator)


class ToyAdapters(Observer):
    """Learns from each step's diff which slot has which adapter; stands in the model's place."""

    def __init__(self) -> None:
        self._adapters: dict[int, str] = {}

    def before(self, info: SchedulerInfo) -> None:
        for new in info.new_requests:
            self._adapters[new.handle] = next(iter(new.extra_keys), "")

    def wrap(self, model: StepModel) -> StepModel:
        forward = model.forward

        def with_adapters(inputs: StepInputs) -> torch.Tensor:
            logits = forward(inputs)
            if inputs.slots is None:
                return logits
            rows = torch.searchsorted(inputs.batch.query_start, inputs.sampled, right=True) - 1
            for index, row in enumerate(rows.tolist()):
                adapter = self._adapters.get(int(inputs.slots[row]), "")
                logits[index] += vector(adapter, logits.shape[1])
            return logits

        model.forward = with_adapters  # type: ignore[method-assign]
        return model


def oracle(tiny: Any, prompt: list[int], adapter: str) -> list[int]:
    history = list(prompt)
    for _ in range(OUTPUT):
        logits = tiny.logits(history)[-1]
        history.append(int((logits + vector(adapter, len(logits))).argmax()))
    return history[len(prompt) :]


def test_each_row_has_its_adapter(tiny_model: Make, engine_args: Make, request_of: Make) -> None:
    """Three adapters and none in one batch, two of them on one prompt."""
    tiny, adapters = tiny_model("llama"), ToyAdapters()
    args = engine_args(tiny.folder)
    plugins = RunnerPlugins(observers=(adapters,), wrap_model=adapters.wrap)
    runner = ModelRunner(args, plugins=plugins)
    config = resolve(args, *runner.profile())
    engine = Engine(config, InlineExecutor(runner, config))
    tokens: dict[int, list[int]] = {key: [] for key in range(len(PROMPTS))}
    for key, (prompt, adapter) in enumerate(zip(PROMPTS, ADAPTERS, strict=True)):
        request = request_of(key, prompt, OUTPUT)
        request.extra_keys = (adapter,) if adapter else ()
        engine.add(request)
    while engine.has_work:
        for deltas in engine.step().values():
            for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                tokens[key].append(token)
    pairs = enumerate(zip(PROMPTS, ADAPTERS, strict=True))
    assert tokens == {key: oracle(tiny, prompt, adapter) for key, (prompt, adapter) in pairs}
    assert tokens[0] != tokens[1]
