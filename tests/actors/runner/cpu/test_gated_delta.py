"""Layers of the gated delta rule as two products and one call, in every family that has them."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rayfin.actors.runner.cpu.gated_delta import PackedDeltaLayer, PackedGatedDelta, delta_parts
from rayfin.actors.runner.cpu.packed_layers import has_products, pack_linears
from rayfin.actors.runner.cpu.recurrent_rows import fuse_recurrent
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.replace import chunked_logits
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.cpu.kernels import CpuKernels, try_kernels

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_next": {"mlp_only_layers": [0, 1, 2]},
    "olmo_hybrid": {"linear_num_value_heads": 2, "linear_allow_neg_eigval": True},
}
CUTS = [0, 1, 2, 20, 21, 37]
TOKENS = torch.arange(3, 40)


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    own = try_kernels(2)
    if own is None:
        pytest.skip("the kernels are not built")
    return own


def paged(family: str, kernels: CpuKernels, dtype: torch.dtype = torch.float32) -> PagedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, own in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            nn.init.normal_(own, 0.5)
    made = PagedModel(model, paged_attention)
    assert fuse_recurrent(made, kernels)
    return made


def layers(model: PagedModel, kind: type[nn.Module] = PackedGatedDelta) -> list[nn.Module]:
    return [own for own in model.transformer.modules() if type(own) is kind]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_families(family: str, kernels: CpuKernels) -> None:
    """Logits equal those of transformers' forward, whole and in chunks; its modules are gone."""
    model = paged(family, kernels)
    before = chunked_logits(model, model, TOKENS, [0, 37])
    assert model.recurrent is not None
    projection = weakref.ref(model.recurrent.modules[0].own.module.conv1d)
    assert pack_linears(model, kernels, parts=True) and len(layers(model)) == 2
    assert len(layers(model, PackedDeltaLayer)) == 2
    for cuts in ([0, 37], CUTS):
        logits = chunked_logits(model, model, TOKENS, cuts)
        torch.testing.assert_close(logits, before, rtol=1e-4, atol=1e-4)
    assert model.recurrent.is_fused
    gc.collect()
    assert projection() is None


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded(kernels: CpuKernels, quantization: Any) -> None:
    """Rounded weights are those of layers that are packed one by one, so the logits are close."""
    merged, single = paged("qwen3_5_text", kernels), paged("qwen3_5_text", kernels)
    assert pack_linears(merged, kernels, quantization, parts=True)
    assert len(layers(merged, PackedDeltaLayer)) == 2
    assert pack_linears(single, kernels, quantization) and not layers(single)
    logits = [chunked_logits(model, model, TOKENS, CUTS) for model in (merged, single)]
    apart = (logits[0] - logits[1]).abs().max()
    assert apart < 0.05 * logits[1].abs().max()


def test_16_bits(kernels: CpuKernels) -> None:
    model = paged("qwen3_5_text", kernels, torch.bfloat16)
    before = chunked_logits(model, model, TOKENS, CUTS)
    assert pack_linears(model, kernels, parts=True) and len(layers(model)) == 2
    logits = chunked_logits(model, model, TOKENS, CUTS)
    assert (logits - before).abs().max() < 0.1 * before.abs().max()


def test_other_logits_keep_the_layers(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the decoder layers, then the layers of the rule."""
    name = "rayfin.kernels.cpu.recurrent_rows.RecurrentKernels."
    monkeypatch.setattr(name + "delta_layer", lambda self, rows, x, *_: x.zero_())
    for count in (2, 0):
        model = paged("qwen3_5_text", kernels)
        before = chunked_logits(model, model, TOKENS, CUTS)
        assert pack_linears(model, kernels, parts=True) and not layers(model, PackedDeltaLayer)
        assert len(layers(model)) == count
        logits = chunked_logits(model, model, TOKENS, CUTS)
        torch.testing.assert_close(logits, before, rtol=1e-4, atol=1e-4)
        wrong: Any = lambda self, rows, x, layer, *_: x.new_ones(len(x), 64)  # noqa: E731
        monkeypatch.setattr(name + "gated_delta", wrong)


@pytest.mark.parametrize("change", ["child", "bias", "parameter", "activation", "norm"])
def test_layers_of_another_form_are_left(kernels: CpuKernels, change: str) -> None:
    model = paged("qwen3_5_text", kernels)
    assert model.recurrent is not None and len(delta_parts(model.recurrent, kernels)) == 2
    module: Any = model.recurrent.modules[0].own.module
    if change == "child":
        module.extra = nn.Linear(4, 4)
    elif change == "bias":
        module.in_proj_z.bias = nn.Parameter(torch.ones(64))
    elif change == "parameter":
        module.extra = nn.Parameter(torch.ones(4))
    elif change == "activation":
        module.activation = "relu"
    else:
        module.norm = nn.LayerNorm(16)
    assert list(delta_parts(model.recurrent, kernels)) == [model.recurrent.modules[1].own.module]


def test_loaded(kernels: CpuKernels, tiny_model: Callable[..., Any], engine_args: Any) -> None:
    """A loaded model has them; torch's threads do not take cores from the kernels'."""
    loaded = load(engine_args(tiny_model("qwen3_next").folder, threads=2))
    assert isinstance(loaded.model, PagedModel) and layers(loaded.model)
    assert not layers(loaded.model, PackedDeltaLayer), "its MLPs are mixtures of experts"
    assert torch.get_num_threads() == 1


def test_torch_keeps_its_threads_for_products_of_its_own(
    kernels: CpuKernels, tiny_model: Callable[..., Any], engine_args: Any
) -> None:
    """Those of adapters, of linear layers, and of experts that no kernel computes."""
    load(engine_args(tiny_model("qwen3_next").folder, threads=2, enable_lora=True))
    assert torch.get_num_threads() == 2
    experts = nn.Module()
    experts.up_proj = nn.Parameter(torch.zeros(4, 8, 16))
    assert has_products(nn.Sequential(nn.Embedding(8, 8), experts))
    assert has_products(nn.Sequential(nn.Linear(8, 8)))
    assert not has_products(nn.Sequential(nn.Embedding(8, 8), nn.Conv1d(8, 8, 4, groups=8)))
