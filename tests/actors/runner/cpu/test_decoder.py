"""Fusing: which models are recognised, that results stay, and that a difference is noticed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.runner.cpu.build_decoder import build_cpu_decoder
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.cpu.packed_experts import PackedExpertsModule
from rayfin.actors.runner.cpu.packed_layers import PackedLinear, pack_linears
from rayfin.actors.runner.models.inspect_layers import norm_weight
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.runner.models.replace import logit_difference, probe_logits
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.cpu.kernels import CpuKernels, try_kernels

DENSE = {
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "olmo2", "granite"),
}
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = try_kernels(2)
    if found is None:
        pytest.skip("the CPU kernels are not built")
    return found


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PagedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION)
    return PagedModel(model.eval().requires_grad_(False), paged_attention)


def test_recognised_or_left_alone(architecture: str, tiny_model: Make, kernels: CpuKernels) -> None:
    fused = build_cpu_decoder(load(tiny_model(architecture).folder), kernels)
    assert (fused is not None) == (architecture in DENSE)


@pytest.mark.parametrize("family", sorted(DENSE))
def test_logits_agree(family: str, tiny_model: Make, kernels: CpuKernels) -> None:
    """Far closer than where fusing is refused: in float32 and with 16-bit weights and pages."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        paged = load(tiny_model(family).folder, dtype)
        fused = build_cpu_decoder(paged, kernels)
        assert fused is not None
        assert logit_difference(fused, paged, probe_logits(paged, paged)) < tolerance


def test_a_head_with_fewer_rows_than_tokens(tiny_model: Make, kernels: CpuKernels) -> None:
    """As of Apertus 1.5, which reads tokens of images and never writes one."""
    paged = load(tiny_model("llama").folder)
    expected = probe_logits(paged, paged)
    head: Any = paged.transformer.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight[:-8], requires_grad=False)
    head.out_features -= 8
    assert build_cpu_decoder(paged, kernels) is None
    paged.pad_logits(expected.shape[1])
    logits = probe_logits(paged, paged)
    torch.testing.assert_close(logits[:, :-8], expected[:, :-8])
    assert bool((logits[:, -8:] == -torch.inf).all())


def test_a_difference_is_noticed(
    tiny_model: Make, kernels: CpuKernels, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that computes something that its structure does not show stays as it is."""
    paged = load(tiny_model("llama").folder)
    mlp = paged.transformer.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 1.01
    assert build_cpu_decoder(paged, kernels) is None
    assert "logits would differ by" in caplog.text


def test_unknown_modules_are_not_recognised(tiny_model: Make, kernels: CpuKernels) -> None:
    for path in ("model.layers.0", "model.layers.2.self_attn", "model.layers.0.mlp", "model"):
        paged = load(tiny_model("llama").folder)
        paged.transformer.get_submodule(path).add_module("extra", torch.nn.Linear(2, 2))
        assert build_cpu_decoder(paged, kernels) is None
    paged = load(tiny_model("llama").folder)
    paged.transformer.model.layers[0].input_layernorm = torch.nn.LayerNorm(32)
    assert build_cpu_decoder(paged, kernels) is None


def test_norms_of_both_kinds() -> None:
    class Norm(torch.nn.Module):
        def __init__(self, offset: float) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.randn(16)), 1e-5
            self.offset = offset

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
            return scaled * (self.offset + self.weight)

    for offset in (0.0, 1.0):
        norm = Norm(offset)
        weight = norm_weight(norm)
        assert weight is not None and weight[1] == 1e-5
        torch.testing.assert_close(weight[0], norm.weight.detach() + offset)
    with pytest.raises(UnrecognizedModule):
        norm_weight(Norm(0.5))
    assert norm_weight(None) is None


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "deepseek_v3", "gpt_neox"])
def test_linear_layers_are_packed(family: str, tiny_model: Make, kernels: CpuKernels) -> None:
    paged = load(tiny_model(family).folder)
    expected = probe_logits(paged, paged)
    pack_linears(paged, kernels)
    kinds = {type(part) for part in paged.transformer.modules()}
    assert PackedLinear in kinds and torch.nn.Linear not in kinds
    torch.testing.assert_close(probe_logits(paged, paged), expected, rtol=1e-4, atol=1e-5)


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 6, "swiglu_limit": 0.3, "sliding_window": 8},
}


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_packed(family: str, kernels: CpuKernels) -> None:
    """In one call of each layer, the router and what experts share beside it."""
    torch.manual_seed(3)
    sizes = {"num_experts_per_tok": 2, "initializer_range": 0.2, **MIXTURES[family]}
    config = AutoConfig.for_model(family, **{**tiny_sizes(), **sizes})
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=ATTENTION
    )
    for name, own in model.named_parameters():
        if name.endswith("bias"):
            own.data.normal_()
    paged = PagedModel(model.eval().requires_grad_(False), paged_attention)
    expected = probe_logits(paged, paged)
    assert pack_linears(paged, kernels)
    packed = [m for m in paged.transformer.modules() if isinstance(m, PackedExpertsModule)]
    assert len(packed) == (1 if family == "qwen2_moe" else 2)
    torch.testing.assert_close(probe_logits(paged, paged), expected, rtol=1e-4, atol=1e-5)


def tiny_sizes() -> dict[str, Any]:
    return {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }


def test_experts_of_another_form_stay(
    tiny_model: Make, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GptOssExperts, "_apply_gate", lambda _, x: x[..., ::2] * x[..., 1::2])
    paged = load(tiny_model("gpt_oss").folder)
    expected = probe_logits(paged, paged)
    assert pack_linears(paged, kernels)
    assert not any(isinstance(m, PackedExpertsModule) for m in paged.transformer.modules())
    torch.testing.assert_close(probe_logits(paged, paged), expected, rtol=1e-4, atol=1e-5)


def test_linear_layers_come_back(tiny_model: Make, kernels: CpuKernels) -> None:
    """A model that reads a weight for itself keeps its own."""
    paged = load(tiny_model("gpt2").folder)
    head = paged.transformer.lm_head
    block = paged.transformer.transformer.h[0].mlp
    forward = block.forward
    block.forward = lambda x: forward(x) * block.c_fc.weight.abs().mean()
    pack_linears(paged, kernels)
    assert paged.transformer.lm_head is head
    assert not any(isinstance(part, PackedLinear) for part in paged.transformer.modules())


def test_the_runner_fuses(tiny_model: Make, served: Make) -> None:
    if try_kernels(1) is None:
        pytest.skip("the CPU kernels are not built")
    assert isinstance(served(tiny_model("qwen3").folder).runner._model, CpuDecoder)
    torch_only = served(tiny_model("qwen3").folder, attention="torch")
    assert isinstance(torch_only.runner._model, PagedModel)


def test_rotary_tables_grow(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Requests longer than the first tables turn by the model's own angles."""
    tiny = tiny_model("llama")
    engine = served(tiny.folder, page_size=16)
    model = engine.runner._model
    if not isinstance(model, CpuDecoder):
        pytest.skip("the CPU kernels are not built")
    model.packed.set_rope_tables(model.rotate(5))
    prompt = [3 + i % 100 for i in range(40)]
    assert engine.run(request_of(0, prompt, 12))[0] == tiny.greedy(prompt, 12)
    assert model.packed.positions >= 52
