"""Recurrent layers run compiled, in every family that is built of the same parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rayfin.actors.runner.cpu.recurrent_rows import fuse_recurrent
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.replace import chunked_logits
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.cpu.kernels import CpuKernels, try_kernels

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "olmo_hybrid": {**DELTA, "linear_num_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0},
}


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    own = try_kernels(2)
    if own is None:
        pytest.skip("the kernels are not built")
    return own


def paged(family: str, dtype: torch.dtype = torch.float32) -> PagedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return PagedModel(model, paged_attention)


def fused(model: PagedModel) -> list[bool]:
    assert model.recurrent is not None
    return [layer.fused is not None for layer in model.recurrent.modules]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_families(family: str, kernels: CpuKernels) -> None:
    """Logits equal those of transformers' own layers, whole and in chunks."""
    model, tokens = paged(family), torch.arange(3, 40)
    ends = [[0, 37], [0, 1, 2, 20, 21, 37]]
    before = chunked_logits(model, model, tokens, ends[0])
    assert fuse_recurrent(model, kernels) and all(fused(model))
    logits = [chunked_logits(model, model, tokens, cuts) for cuts in ends]
    torch.testing.assert_close(logits[0], before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1], before, rtol=1e-4, atol=1e-4)


def test_states_are_float32(kernels: CpuKernels) -> None:
    model = paged("qwen3_5_text", torch.bfloat16)
    assert model.recurrent is not None and fuse_recurrent(model, kernels)
    assert {layout.dtype for layout in model.recurrent.layouts} == {torch.float32}


def test_other_logits_keep_the_layers(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = paged("qwen3_5_text", torch.bfloat16), torch.arange(3, 20)
    before, layouts = chunked_logits(model, model, tokens, [0, 9, 17]), model.recurrent.layouts[:]
    name = "rayfin.kernels.cpu.recurrent_rows.RecurrentKernels.delta_rule"
    monkeypatch.setattr(name, lambda self, rows, q, k, v, *_, **__: torch.full_like(v, 1e3))
    assert not fuse_recurrent(model, kernels) and not any(fused(model))
    assert model.recurrent.layouts == layouts
    assert torch.equal(chunked_logits(model, model, tokens, [0, 9, 17]), before)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "lfm2"])
def test_loaded(family: str, tiny_model: Callable[..., Any], engine_args: Any) -> None:
    loaded = load(engine_args(tiny_model(family).folder))
    assert loaded.recurrent is not None and loaded.kernels is not None
    assert all(layer.fused for layer in loaded.recurrent.modules)


def test_other_parts_stay(tiny_model: Callable[..., Any], engine_args: Any) -> None:
    """Mamba 1's scan has no compiled form."""
    loaded = load(engine_args(tiny_model("mamba").folder))
    assert loaded.recurrent is not None
    assert not any(layer.fused for layer in loaded.recurrent.modules)
