"""Norms and gated MLPs on compiled kernels, in a model that is not fused as a whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from rayfin.actors.config import EngineArgs
from rayfin.actors.runner.cpu.packed_layers import PackedLinear, pack_linears
from rayfin.actors.runner.cpu.packed_parts import (
    PackedGatedNorm,
    PackedMLP,
    PackedNorm,
    PackedWeight,
    packed_norms,
    packed_routers,
    rows_apart,
)
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.replace import chunked_logits, probe_logits
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


FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_has_the_same_bits_in_any_step(
    family: str, kernels: CpuKernels, tiny_model: Callable[[str], Any]
) -> None:
    """Alone in a step, or beside others of its request: routers and gates do not depend on them."""
    folder = str(tiny_model(family).folder)
    model = load(EngineArgs(model=folder, device="cpu", dtype="float32", threads=1)).model
    assert isinstance(model, PagedModel)
    tokens = torch.arange(3, 43)
    alone = chunked_logits(model, model, tokens, range(len(tokens) + 1))
    for cuts in ([0, 40], [0, 17, 18, 40], [0, 5, 7, 10, 40]):
        assert torch.equal(chunked_logits(model, model, tokens, cuts), alone), cuts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_multiplies_on_the_kernels(dtype: torch.dtype, kernels: CpuKernels) -> None:
    """By its own code, in its own dtype; the router itself stays as it is."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 32, dtype=dtype), requires_grad=False)
            self.bias = nn.Parameter(torch.randn(6, dtype=dtype), requires_grad=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wide = functional.linear(x.float(), self.weight.float(), self.bias.float())
            return functional.linear(x, self.weight, bias=self.bias), wide

    owner = nn.ModuleDict({"gate": Router(), "other": nn.Linear(32, 6), "rows": nn.Embedding(9, 6)})
    ((_, name, twin),) = packed_routers(owner, kernels)
    plain = owner["gate"]
    assert name == "gate" and type(twin) is Router and type(twin.weight) is PackedWeight
    assert type(plain.weight) is nn.Parameter and twin.bias is plain.bias
    assert torch.equal(twin.weight + 1, plain.weight + 1)
    x = torch.randn(1, 5, 32).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for one, other in zip(twin(x), plain(x), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    for wide in (0, 1):
        rows = [twin(x[:, row : row + 1])[wide] for row in range(5)]
        assert torch.equal(torch.cat(rows, dim=1), twin(x)[wide])


@pytest.mark.parametrize("columns", [1, 4, 31, 32, 40])
def test_functions_of_rows_that_lie_apart(columns: int) -> None:
    """Each row of a sigmoid has the bits that it has alone."""
    rows = rows_apart(37, columns).copy_(torch.randn(37, columns))
    for function in (torch.sigmoid, functional.softplus, functional.silu, torch.tanh):
        whole = function(rows)
        for row in range(37):
            alone = rows_apart(1, columns).copy_(rows[row : row + 1])
            assert torch.equal(function(alone), whole[row : row + 1])
