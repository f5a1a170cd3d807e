"""The fused model for GPUs: on one where there is one, else in Triton's interpreter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayfin.actors.runner.fuse import probe_logits
from rayfin.actors.runner.paged_model import ATTENTION, PagedModel
from rayfin.kernels.attention.torch import paged_attention

pytest.importorskip("triton")
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
