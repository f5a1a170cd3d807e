"""Norms and gated MLPs on compiled kernels, in a model that is not fused as a whole."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from rayfin.actors.runner.cpu.packed_layers import PackedLinear, pack_linears
from rayfin.actors.runner.cpu.packed_parts import (
    PackedGatedNorm,
    PackedMLP,
    PackedNorm,
    packed_norms,
)
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.replace import probe_logits
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.cpu.kernels import CpuKernels, try_kernels

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    own = try_kernels(2)
    if own is None:
        pytest.skip("the kernels are not built")
    return own


def paged() -> PagedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **SIZES)).eval()
    for norm in model.modules():
        if type(norm) in (Qwen3_5RMSNorm, Qwen3_5RMSNormGated):
            nn.init.normal_(norm.weight, 0.5)
    return PagedModel(model, paged_attention)


def count(model: PagedModel, kind: type[nn.Module]) -> int:
    return sum(type(module) is kind for module in model.transformer.modules())


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_hybrid(kernels: CpuKernels, quantization: Any) -> None:
    model = paged()
    before = probe_logits(model, model)
    assert pack_linears(model, kernels, quantization, parts=True)
    assert count(model, PackedMLP) == 2 and count(model, PackedGatedNorm) == 1
    assert count(model, PackedNorm) == 2 * 2 + 2 + 1  # layers, query and key, the last one
    tolerance = 0.2 if quantization else 1e-4
    torch.testing.assert_close(probe_logits(model, model), before, rtol=0, atol=tolerance)


def test_linears_without_parts(kernels: CpuKernels) -> None:
    model = paged()
    assert pack_linears(model, kernels)
    assert not any(count(model, kind) for kind in (PackedMLP, PackedNorm, PackedGatedNorm))


def test_an_mlp_that_computes_something_else_keeps_its_layers(kernels: CpuKernels) -> None:
    model = paged()
    mlp: Any = model.transformer.model.layers[0].mlp
    plain = type(mlp)

    class Scaled(plain):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = 3 * super().forward(x)
            return scaled

    mlp.__class__ = Scaled
    before = probe_logits(model, model)
    assert pack_linears(model, kernels, parts=True)
    assert type(mlp.up_proj) is PackedLinear and not count(model, PackedMLP)
    torch.testing.assert_close(probe_logits(model, model), before, rtol=1e-4, atol=1e-4)


def test_other_norms_stay(kernels: CpuKernels) -> None:
    """Mamba's norm multiplies by the gate first; a layer norm subtracts the mean."""
    owner = nn.ModuleList([MambaRMSNormGated(8, 4), nn.LayerNorm(8), nn.LayerNorm(8, bias=False)])
    assert not list(packed_norms(owner, kernels))
