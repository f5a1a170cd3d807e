"""The steps that a replacement of a model is held to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayfin.actors.runner import checkpoint, loading
from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.models.replace import PROBE_TOKENS, probe_logits

Make = Callable[..., Any]


def test_prompts_in_chunks_and_a_decode_row_on_the_engine_s_pages(
    tiny_model: Make, engine_args: Make
) -> None:
    """So that decode tiles are compared too, compiled for the pages that requests get."""
    paged = loading.load(engine_args(tiny_model("llama").folder, attention="torch")).model
    forward, steps = paged.forward, []

    def recorded(inputs: StepInputs) -> torch.Tensor:
        steps.append(inputs)
        return forward(inputs)

    paged.forward = recorded
    for page_size in (5, 16):
        steps.clear()
        logits = probe_logits(paged, paged, page_size)
        assert len(logits) == PROBE_TOKENS
        assert [step.batch.decoding for step in steps] == [0, 0, 0, 0, 1]
        assert [len(step.input_ids) for step in steps][-3:] == [4, 2, 1]  # rows of a GPU's kernels
        assert all(step.batch.page_size == page_size for step in steps)
        whole = torch.cat([step.input_ids for step in steps])
        assert len(whole) == PROBE_TOKENS and len(steps[-1].input_ids) == 1


def test_a_gpu_s_model_is_built_for_the_page_size(
    tiny_model: Make, engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from rayfin.actors.runner.gpu import decoder, experts

    sizes: list[int] = []

    def built(*inputs: Any, **_: Any) -> None:
        sizes.append(inputs[2])

    monkeypatch.setattr(checkpoint, "can_use_triton", lambda device: True)
    monkeypatch.setattr(decoder, "build_gpu_decoder", built)
    monkeypatch.setattr(experts, "group_experts", lambda *inputs: sizes.append(inputs[1]))
    loading.load(engine_args(tiny_model("llama").folder, page_size=12))
    assert sizes == [12, 12]
