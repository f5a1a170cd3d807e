"""The steps that compile kernels before requests come."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfin.actors.runner import model_runner
from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.sampler import Sampler
from rayfin.actors.runner.speculation import make
from rayfin.actors.runner.speculation.draft_model import DraftedModel
from rayfin.kernels.shapes import SamplingRows

pytest.importorskip("triton")
from rayfin.actors.runner.gpu import warm_up as module
from rayfin.actors.runner.gpu.warm_up import WARMED_TOKENS, warm_up
from rayfin.actors.step_cost import StepCost
from rayfin.kernels.grouped import Grouped
from rayfin.kernels.triton import quantized
from rayfin.kernels.triton.products import FEW_ROWS, MMA_ROWS, _programs, mma_sizes
from rayfin.kernels.triton.quantized import CodedWeight, most_rows, pack_weight, shape_for

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


def run(num_pages: int, most_tokens: int) -> tuple[list[StepInputs], list[SamplingRows]]:
    drawn: list[SamplingRows] = []

    def sample(logits: torch.Tensor, rows: SamplingRows, allowed: Any = None) -> torch.Tensor:
        drawn.append(rows)
        return torch.zeros(len(logits), dtype=torch.int64)

    model = Recording()
    sampler = Sampler(RequestSlots(1, 1), CPU, sample)
    warm_up(model, sampler, 4, num_pages, most_tokens, CPU)  # type: ignore[arg-type]
    return model.steps, drawn


def coded_weights() -> list[CodedWeight]:
    """Weights of codes for each of their kernels, of few and of many outputs."""
    made = []
    for outputs in (8, quantized.SHORT + 1):
        codes = torch.zeros(outputs, 128, dtype=torch.uint8)
        plain = Grouped(codes, torch.ones(outputs, 1), 128, 4)
        for weight in (plain, replace(plain, table=torch.linspace(-1, 1, 16))):
            coded = pack_weight(weight, torch.bfloat16)
            assert coded is not None
            made.append(coded)
    assert [weight.parted for weight in made] == [True, False] * 2
    return made


def test_every_height_of_tiles_and_a_step_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are compiled for: no later step meets a product's kernel first."""
    steps, drawn = run(num_pages=100, most_tokens=1000)
    lengths = [len(step.input_ids) for step in steps]
    few = [length for length in lengths if length <= FEW_ROWS]
    heights = [_programs(rows, 1024, 1024, torch.bfloat16)[1]["ROWS"] for rows in range(1, 5)]
    assert FEW_ROWS == 4 and set(few) == set(heights)
    more = [mma_sizes(length, 1024) for length in lengths if FEW_ROWS < length <= MMA_ROWS]
    assert [sizes["ROWS"] for sizes in more] == [8, 16]

    def way(rows: int, weight: CodedWeight) -> object:
        """The tile of a product with codes; "whole" where another kernel makes the weight so."""
        x, shared = torch.empty(rows, 128, dtype=torch.bfloat16), quantized.shared_bytes(CPU)
        return "whole" if rows > most_rows(weight, x) else shape_for(rows, weight, x.dtype, shared)

    for shared in (99 << 10, 227 << 10):
        monkeypatch.setattr(quantized, "shared_bytes", lambda device, size=shared: size)
        for weight in coded_weights():
            wanted, met = (
                {way(rows, weight) for rows in heights} for heights in (range(1, 300), lengths)
            )
            assert met == wanted, "a tile of weights of few bits is not compiled"
            assert "whole" in met
    assert max(lengths) > FEW_ROWS and tuple(lengths) == WARMED_TOKENS
    assert [step.batch.rows for step in steps] == [1, *[2] * 8]
    for step in steps:  # tiles of decodes and of prompts
        assert step.batch.decoding == 1
        assert step.batch.slots.max() < 100 * 4
    assert len(drawn) == len(steps) and drawn[0].any_top_k and drawn[0].any_top_p


def test_no_step_is_longer_than_the_pages_or_what_is_allowed() -> None:
    def lengths(num_pages: int, most_tokens: int) -> list[int]:
        return [len(step.input_ids) for step in run(num_pages, most_tokens)[0]]

    assert lengths(num_pages=9, most_tokens=1000) == [1, 2, 4, 8, 16, 17, 33]
    assert lengths(num_pages=100, most_tokens=3) == [1, 2]


def test_a_runner_on_a_gpu_starts_with_it(
    tiny_model: Make, served: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "warm_up", lambda *inputs: called.append(inputs))
    runner = served(tiny_model("llama").folder).runner
    config = runner._bound[0]
    most = min(config.max_model_len, config.limits.max_batch_tokens)
    called.clear()
    runner._warm_up(config)
    assert not called, "a CPU compiles nothing"
    runner._loaded = replace(runner._loaded, device=torch.device("cuda"))
    runner._warm_up(config)
    ((_, sampler, *sizes),) = called
    assert sampler is runner._sampler
    assert sizes == [4, config.num_pages, most, torch.device("cuda")]
    limits = replace(config.limits, max_batch_tokens=5)
    runner._warm_up(replace(config, limits=limits))
    assert called[-1][4] == 5, "memory was measured for steps of no more tokens"


def test_a_draft_model_runs_the_steps_too() -> None:
    """Its kernels are for its own sizes. It may have fewer positions, and computes prompts beside
    the large model's."""
    target, draft = Recording(), Recording()
    pair = DraftedModel(target, draft, 40)  # type: ignore[arg-type]
    warm_up(pair, None, 4, 100, 1000, CPU)
    lengths = [[len(step.input_ids) for step in model.steps] for model in (target, draft)]
    assert lengths == [
        list(WARMED_TOKENS),
        [1, 2, 4, 8, 16, 17, 33, 1, 3, 7, 15, 16, 32],
    ]


def test_steps_are_timed_when_their_kernels_are_compiled(
    tiny_model: Make, served: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the table of a speculator's costs holds the compiler's time, and ends for it."""
    done: list[str] = []

    def measured(*inputs: Any, few: bool) -> StepCost:
        assert not few  # a setting names the method
        done.append("measure")
        return StepCost.assumed()

    monkeypatch.setattr(make, "measure_steps", measured)
    monkeypatch.setattr(model_runner.ModelRunner, "_warm_up", lambda *_: done.append("compile"))
    speculation = '{"method": "ngram", "num_speculative_tokens": 2}'
    engine = served(tiny_model("llama").folder, speculative_config=speculation)
    assert done == ["compile", "measure"]
    engine.executor.restart()  # the pages are kept, and such steps would write over them
    assert done == ["compile", "measure"]
