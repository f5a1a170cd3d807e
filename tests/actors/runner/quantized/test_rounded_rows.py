"""The demo model in blocks of GGUF files: what rounding its rows to 8 bits changes."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from demo_model.evaluate import MODEL_DIR
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.runner.models.replace import probe_logits
from rayfin.actors.runner.quantized.gguf_blocks import Gguf
from rayfin.actors.runner.quantized.packed import CodedLinear
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.cpu.codes import pack_codes
from rayfin.kernels.cpu.kernels import CpuKernels, try_kernels
from rayfin.kernels.grouped import Grouped

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = try_kernels(1)
    if found is None:
        pytest.skip("the CPU kernels are not built")
    return found


def load() -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        MODEL_DIR, dtype=torch.float32, attn_implementation=ATTENTION
    )
    return model.eval().requires_grad_(False)


def blocks_of(weight: torch.Tensor, kind: str) -> Grouped:
    outputs, inputs = weight.shape
    octets = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    stored = Gguf(8, None, "gguf").as_stored([kind])
    return stored.grouped(outputs, inputs, {kind: torch.from_numpy(octets)})


def logits_of(kind: str, kernels: CpuKernels | None, *, round_rows: bool = False) -> torch.Tensor:
    """With all linear layers, the head too, in blocks; without kernels of their plain numbers."""
    model = load()
    found = [(path, own) for path, own in model.named_modules() if type(own) is nn.Linear]
    for path, linear in found:
        weight = blocks_of(linear.weight, kind)
        if kernels is None:
            linear.weight = nn.Parameter(weight.dense(), requires_grad=False)
            continue
        matrix = pack_codes(kernels, weight, round_rows=round_rows)
        assert matrix is not None and matrix.rounds_rows == round_rows
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, CodedLinear(kernels, matrix, None, torch.float32))
    paged = PagedModel(model, paged_attention)
    return probe_logits(paged, paged)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_the_demo_model_stays_near(kind: str, kernels: CpuKernels) -> None:
    """Logits within 5 % of those with exact rows, most often the same token."""
    expected = logits_of(kind, None)
    exact, rounded = (logits_of(kind, kernels, round_rows=rounds) for rounds in (False, True))
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    error = float((rounded - expected).norm() / expected.norm())
    print(f"{kind}: logits differ by {error:.2%}")
    assert 1e-4 < error < 0.05
    assert (rounded.argmax(-1) == expected.argmax(-1)).float().mean() > 0.7
