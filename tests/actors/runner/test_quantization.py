"""Weights of 8 bits: what they change and what they do not, and where they are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo_model.evaluate import MODEL_DIR
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.runner.checkpoint import on_cpu_kernels
from rayfin.actors.runner.cpu.build_decoder import build_cpu_decoder
from rayfin.actors.runner.cpu.packed_experts import PackedExpertsModule
from rayfin.actors.runner.cpu.packed_layers import PackedLinear, pack_linears
from rayfin.actors.runner.loading import _require_quantisable
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.runner.models.replace import probe_logits
from rayfin.actors.runner.quantized.packed import INT4_BYTES, int4_saves
from rayfin.actors.settings.choices import Quantization
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.cpu.codes import CodedMatrix, Codes
from rayfin.kernels.cpu.kernels import CpuKernels, Matrix, try_kernels

Make = Callable[..., Any]
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((7, 12, 1, 16, 9))]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = try_kernels(1)
    if found is None:
        pytest.skip("the CPU kernels are not built")
    return found


def load(folder: Path) -> PagedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION
    )
    return PagedModel(model.eval().requires_grad_(False), paged_attention)


def is_rounded(matrix: Matrix, codes: Codes) -> bool:
    return isinstance(matrix, CodedMatrix) and matrix.rounds_rows and matrix.codes == codes


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def test_the_demo_model_stays_near(kernels: CpuKernels) -> None:
    """Logits within 5 % of the exact ones (3.5 % once measured), most often the same token."""
    paged = load(MODEL_DIR)
    expected = probe_logits(paged, paged)
    fused = build_cpu_decoder(paged, kernels, "int8")
    assert fused is not None and is_rounded(fused.packed.embedding, Codes.INT8)
    logits = probe_logits(fused, paged)
    assert 0.005 < error(logits, expected) < 0.05
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8


def test_the_demo_model_in_4_bits(kernels: CpuKernels) -> None:
    paged = load(MODEL_DIR)
    expected = probe_logits(paged, paged)
    fused = build_cpu_decoder(paged, kernels, "int4")
    assert fused is not None and is_rounded(fused.packed.embedding, Codes.INT8)
    logits = probe_logits(fused, paged)
    assert 0.01 < error(logits, expected) < 0.25  # 21 % once measured
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.5


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_linear_layers_that_are_packed_alone(
    family: str, tiny_model: Make, kernels: CpuKernels
) -> None:
    paged = load(tiny_model(family).folder)
    expected = probe_logits(paged, paged)
    assert pack_linears(paged, kernels, "int8")
    packed = [part for part in paged.transformer.modules() if isinstance(part, PackedLinear)]
    assert packed and all(is_rounded(part._weight, Codes.INT8) for part in packed)
    assert 0.001 < error(probe_logits(paged, paged), expected) < 0.2


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_experts_are_rounded(bits: Quantization, tiny_model: Make, kernels: CpuKernels) -> None:
    paged = load(tiny_model("mixtral").folder)
    config = paged.transformer.config
    x, chances = torch.randn(8, config.hidden_size), torch.rand(8, 2)
    chosen = torch.tensor([[0, 1], [2, 3]]).repeat(4, 1)
    expected = paged.transformer.model.layers[0].mlp.experts(x, chosen, chances)
    weights = sum(own.numel() for own in paged.transformer.parameters() if own.dim() == 3)
    assert int4_saves(paged.transformer, torch.float32) > (4 - INT4_BYTES) * weights
    assert pack_linears(paged, kernels, bits)
    mixtures = [layer.mlp.experts for layer in paged.transformer.model.layers]
    assert all(isinstance(mixture, PackedExpertsModule) for mixture in mixtures)
    found = [mixture.experts for mixture in mixtures]
    matrices = [matrix for experts in found for matrix in (*experts.gate_up, *experts.down)]
    codes = {"int4": Codes.LEVELS4, "int8": Codes.INT8}[bits]
    assert all(is_rounded(matrix, codes) for matrix in matrices)
    assert 0.001 < error(mixtures[0](x, chosen, chances), expected) < 0.2


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_tokens_do_not_depend_on_company(
    bits: str, kernels: CpuKernels, tiny_model: Make, served: Make, request_of: Make
) -> None:
    folder = tiny_model("qwen3").folder
    alone: dict[int, list[int]] = {}
    for key, prompt in enumerate(PROMPTS):
        engine = served(folder, quantization=bits)
        alone |= engine.run(request_of(key, prompt, 12))
    together = served(folder, quantization=bits)
    assert together.run(*(request_of(key, p, 12) for key, p in enumerate(PROMPTS))) == alone
    staggered = served(folder, quantization=bits, max_batch_tokens=9)
    requests = [request_of(key, prompt, 12) for key, prompt in enumerate(PROMPTS)]
    assert staggered.run(*requests, stagger=2) == alone


def test_refused(tiny_model: Make, engine_args: Make) -> None:
    args = engine_args(tiny_model("llama").folder, quantization="int8", attention="torch")
    with pytest.raises(InvalidConfig, match="attention 'torch'") as caught:
        ModelRunner(args)
    assert caught.value.param == "quantization"


def test_refused_on_a_gpu_without_triton(engine_args: Make) -> None:
    args = engine_args("x", quantization="int8", device="cuda", attention="torch")
    with pytest.raises(InvalidConfig, match="kernels of a GPU, not with") as caught:
        _require_quantisable(args, torch.device("cuda"))
    assert caught.value.param == "quantization"


def test_refused_without_kernels(
    tiny_model: Make, engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfin.actors.runner.loading.try_load", lambda: None)
    with pytest.raises(InvalidConfig, match="not built"):
        ModelRunner(engine_args(tiny_model("llama").folder, quantization="int8"))


def test_a_model_that_reads_its_weights(tiny_model: Make, kernels: CpuKernels) -> None:
    paged = load(tiny_model("gpt2").folder)
    block = paged.transformer.transformer.h[0].mlp
    forward = block.forward
    block.forward = lambda x: forward(x) * block.c_fc.weight.abs().mean()
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel cannot be quantised"):
        on_cpu_kernels(paged, kernels, "int8")
