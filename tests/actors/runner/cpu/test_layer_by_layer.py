"""What weights are compared by before they are rounded: one layer at a time, the same logits."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayfin.actors.runner.cpu import build_decoder, layer_by_layer, packed_layers
from rayfin.actors.runner.cpu.build_decoder import _layer_by_layer, build_cpu_decoder
from rayfin.actors.runner.cpu.packed_layers import pack_linears
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.runner.models.replace import probe_logits
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.cpu.kernels import CpuKernels, Matrix, try_kernels

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = try_kernels(1)
    if found is None:
        pytest.skip("the CPU kernels are not built")
    return found


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PagedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION)
    return PagedModel(model.eval().requires_grad_(False), paged_attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3_text", "olmo2", "granite"])
def test_the_logits_of_the_whole_decoder(
    family: str,
    dtype: torch.dtype,
    tiny_model: Make,
    kernels: CpuKernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged = load(tiny_model(family).folder, dtype)
    whole = build_cpu_decoder(paged, kernels)
    assert whole is not None
    expected = probe_logits(whole, paged)
    for block in (1 << 22, 700):  # the head at once, and by parts
        monkeypatch.setattr(layer_by_layer, "HEAD_BLOCK", block)
        found = probe_logits(_layer_by_layer(paged, kernels), paged)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_difference_is_noticed(
    bits: Any, tiny_model: Make, kernels: CpuKernels, caplog: pytest.LogCaptureFixture
) -> None:
    paged = load(tiny_model("llama").folder)
    mlp = paged.transformer.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 1.01
    assert build_cpu_decoder(paged, kernels, bits) is None
    assert "logits would differ by" in caplog.text


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of exact matrices that are in memory."""
    made: list[weakref.ref[Matrix]] = []
    real = Matrix.__init__

    def record(self: Matrix, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        made.append(weakref.ref(self))

    def count() -> int:
        gc.collect()
        found = [ref() for ref in made]
        return sum(one is not None and one.storage != torch.int8 for one in found)

    monkeypatch.setattr(Matrix, "__init__", record)
    return count


def test_one_layer_s_exact_weights_are_in_memory(
    tiny_model: Make,
    kernels: CpuKernels,
    alive: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    real = build_decoder.pack_layer

    def spy(*args: Any) -> Any:
        counts.append(alive())
        return real(*args)

    monkeypatch.setattr(build_decoder, "pack_layer", spy)
    assert build_cpu_decoder(load(tiny_model("llama").folder), kernels, "int8") is not None
    layers = len(counts) // 2
    assert layers > 1 and counts == [1] * layers + [0] * layers  # 1: what stands for the head


def test_one_module_s_exact_weights_are_in_memory(
    tiny_model: Make,
    kernels: CpuKernels,
    alive: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model that is not fused as a whole."""
    counts: list[int] = []
    real = packed_layers.packed

    def spy(*args: Any, **kwargs: Any) -> Any:
        counts.append(alive())
        return real(*args, **kwargs)

    monkeypatch.setattr(packed_layers, "packed", spy)
    paged = load(tiny_model("gpt2").folder)
    assert pack_linears(paged, kernels, "int8")
    assert len(counts) > 8 and max(counts) == 0
