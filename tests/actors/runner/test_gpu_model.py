"""The fused model for GPUs: on one where there is one, else in Triton's interpreter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayfin.actors.runner import model_runner
from rayfin.actors.runner.fuse import probe_logits
from rayfin.actors.runner.paged_model import ATTENTION, PagedModel
from rayfin.actors.scheduler import lease
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.attention.torch import paged_attention
from rayfin.kernels.sampling import select as sampling_select

pytest.importorskip("triton")
from rayfin.actors.runner.fuse_experts import GroupedExperts, group_experts
from rayfin.actors.runner.gpu_model import fuse_for_gpu
from rayfin.kernels.attention.triton import TritonAttention

Make = Callable[..., Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(folder: Path) -> PagedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION)
    return PagedModel(model.to(DEVICE).eval().requires_grad_(False), paged_attention)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text", "olmo2"])
def test_logits_agree(family: str, tiny_model: Make) -> None:
    """Biases, norms of heads and of all heads, norms on both sides, windows."""
    paged = load(tiny_model(family).folder)
    wanted = probe_logits(paged, paged)
    fused = fuse_for_gpu(paged, TritonAttention(DEVICE))
    assert fused is not None
    torch.testing.assert_close(probe_logits(fused, paged), wanted, rtol=1e-4, atol=1e-4)
    again = probe_logits(paged, paged)  # on the merged weights, of which it has a part
    torch.testing.assert_close(again, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_not_recognised_or_differs_stays(
    tiny_model: Make, caplog: pytest.LogCaptureFixture
) -> None:
    paged = load(tiny_model("llama").folder)
    mlp = paged.transformer.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 1.01
    assert fuse_for_gpu(paged, TritonAttention(DEVICE)) is None
    assert "logits would differ by" in caplog.text
    mlp.add_module("extra", torch.nn.Linear(2, 2))
    assert fuse_for_gpu(paged, TritonAttention(DEVICE)) is None


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_are_grouped(family: str, tiny_model: Make) -> None:
    """In a decoder that is fused as a whole, and in one whose attention is not recognised."""
    paged = load(tiny_model(family).folder)
    wanted = probe_logits(paged, paged)
    assert group_experts(paged)
    grouped = [own for own in paged.transformer.modules() if isinstance(own, GroupedExperts)]
    assert len(grouped) == (2 if family == "deepseek_v3" else 3)
    torch.testing.assert_close(probe_logits(paged, paged), wanted, rtol=1e-4, atol=1e-4)
    fused = fuse_for_gpu(paged, TritonAttention(DEVICE))
    assert (fused is None) == (family == "deepseek_v3")
    if fused is not None:
        torch.testing.assert_close(probe_logits(fused, paged), wanted, rtol=1e-4, atol=1e-4)


def test_experts_that_differ_stay(tiny_model: Make, caplog: pytest.LogCaptureFixture) -> None:
    paged = load(tiny_model("mixtral").folder)
    experts = paged.transformer.model.layers[1].mlp.experts
    forward = experts.forward
    experts.forward = lambda *inputs: forward(*inputs) * 1.01
    assert not group_experts(paged)
    assert paged.transformer.model.layers[1].mlp.experts is experts
    assert "logits would differ by" in caplog.text


def test_tokens_of_a_mixture(
    tiny_model: Make, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What transformers says, through the runner: prompts in chunks, and leases as on a GPU."""
    for module in (model_runner, attention_select, sampling_select):
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(lease, "CALL_SECONDS", 1e6)  # long leases, however slow the machine
    tiny = tiny_model("mixtral")
    engine = served(
        tiny.folder, attention="triton", max_lease=3, max_decoding_batch=2, device=DEVICE.type
    )
    assert engine.runner._gpu_model is not None
    engine.runner._model.forward, engine.runner._advance = engine._forward, engine._advance
    prompt = [5, 9, 3, 100, 7]
    assert engine.run(request_of(0, prompt, 6))[0] == tiny.greedy(prompt, 6)
