"""The steps that compile kernels before requests come."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfin.actors.runner import model_runner
from rayfin.actors.runner.proposers.draft_model import DraftedModel
from rayfin.actors.runner.sampling.sampler import Sampler
from rayfin.actors.runner.step.batch import StepInputs
from rayfin.actors.runner.step.request_slots import RequestSlots
from rayfin.kernels.shapes import SamplingRows

pytest.importorskip("triton")
from rayfin.actors.runner.gpu import warm_up as module
from rayfin.actors.runner.gpu.warm_up import WARMED_TOKENS, warm_up
from rayfin.actors.step_cost import StepCost
from rayfin.kernels.triton.products import FEW_ROWS, _programs
from rayfin.kernels.triton.quantized import shape_for

Make = Callable[..., Any]
CPU = torch.device("cpu")


class Recording:
    """A model that keeps what it was asked for."""

    layouts: tuple[()] = ()
    dtype = torch.float32

    def __init__(self) -> None:
        self.steps: list[StepInputs] = []

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        self.steps.append(inputs)
        return torch.zeros(len(inputs.sampled), 7)


def run(num_pages: int, model_len: int) -> tuple[list[StepInputs], list[SamplingRows]]:
    drawn: list[SamplingRows] = []

    def sample(logits: torch.Tensor, rows: SamplingRows, allowed: Any = None) -> torch.Tensor:
        drawn.append(rows)
        return torch.zeros(len(logits), dtype=torch.int64)

    model = Recording()
    sampler = Sampler(RequestSlots(1, 1), CPU, sample)
    warm_up(model, sampler, 4, num_pages, model_len, CPU)  # type: ignore[arg-type]
    return model.steps, drawn


def test_every_height_of_tiles_and_a_step_of_many_rows() -> None:
    """As they are compiled for: no later step meets a product's kernel first."""
    steps, drawn = run(num_pages=100, model_len=1000)
    lengths = [len(step.input_ids) for step in steps]
    few = [length for length in lengths if length <= FEW_ROWS]
    heights = [_programs(rows, 1024, 1024, torch.bfloat16)[1]["ROWS"] for rows in range(1, 5)]
    assert FEW_ROWS == 4 and set(few) == set(heights)
    for shared in (99 << 10, 227 << 10):
        wanted, met = (
            {shape_for(rows, torch.bfloat16, shared) for rows in heights}
            for heights in (range(1, 2000), lengths)
        )
        assert met == wanted, "a tile of weights of few bits is not compiled"
    assert max(lengths) > FEW_ROWS and tuple(lengths) == WARMED_TOKENS
    assert [step.batch.rows for step in steps] == [1, 2, 2, 2, 2]
    for step in steps:  # tiles of decodes and of prompts
        assert step.batch.decoding == 1
        assert step.batch.slots.max() < 100 * 4
    assert len(drawn) == len(steps) and drawn[0].any_top_k and drawn[0].any_top_p


def test_no_step_is_longer_than_the_pages_or_the_model() -> None:
    assert [len(step.input_ids) for step in run(num_pages=9, model_len=1000)[0]] == [1, 2, 4, 17]
    assert [len(step.input_ids) for step in run(num_pages=100, model_len=3)[0]] == [1, 2]


def test_a_runner_on_a_gpu_starts_with_it(
    tiny_model: Make, served: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "warm_up", lambda *inputs: called.append(inputs))
    runner = served(tiny_model("llama").folder).runner
    config = runner._bound[0]
    called.clear()
    runner._warm_up(config)
    assert not called, "a CPU compiles nothing"
    runner._loaded = replace(runner._loaded, device=torch.device("cuda"))
    runner._warm_up(config)
    ((_, sampler, *sizes),) = called
    assert sampler is runner._sampler
    assert sizes == [4, config.num_pages, config.max_model_len, torch.device("cuda")]


def test_a_draft_model_runs_the_steps_too() -> None:
    """Its kernels are for its own sizes. It may have fewer positions, and computes prompts beside
    the large model's."""
    target, draft = Recording(), Recording()
    pair = DraftedModel(target, draft, 40)  # type: ignore[arg-type]
    warm_up(pair, None, 4, 100, 1000, CPU)
    lengths = [[len(step.input_ids) for step in model.steps] for model in (target, draft)]
    assert lengths == [[1, 2, 4, 17, 65], [1, 2, 4, 17, 1, 3, 16]]


def test_steps_are_timed_when_their_kernels_are_compiled(
    tiny_model: Make, served: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the table of a speculator's costs holds the compiler's time, and ends for it."""
    done: list[str] = []

    def measured(*inputs: Any, few: bool) -> StepCost:
        assert not few  # a setting names the method
        done.append("measure")
        return StepCost.assumed()

    monkeypatch.setattr(model_runner, "measure_steps", measured)
    monkeypatch.setattr(model_runner.ModelRunner, "_warm_up", lambda *_: done.append("compile"))
    speculation = '{"method": "ngram", "num_speculative_tokens": 2}'
    engine = served(tiny_model("llama").folder, speculative_config=speculation)
    assert done == ["compile", "measure"]
    engine.executor.restart()
    assert done == ["compile", "measure"] * 2
