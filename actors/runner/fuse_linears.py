"""Packed linear layers in a model that is not fused whole: mixtures of experts, GPT-2, GPT-NeoX.

Small products of few rows are most of a decode step, and where torch on a CPU is slowest.
"""

import logging
from collections.abc import Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rayfin.actors.config import Quantization
from rayfin.actors.runner.fuse import TOLERANCE, WEIGHTS, probe_logits
from rayfin.actors.runner.paged_model import PagedModel
from rayfin.kernels.cpu.kernels import CpuKernels

logger = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """y = x W^T + b by the compiled kernels; takes and gives the dtype of x."""

    def __init__(
        self,
        kernels: CpuKernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        storage: torch.dtype | None,
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self._weight = kernels.pack([weight], storage=storage)
        self._bias = None if bias is None else bias.detach().float().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1]).float()
        y = self._kernels.matmul(rows, self._weight, bias=self._bias)
        return y.view(*x.shape[:-1], y.shape[-1]).to(x.dtype)


@torch.inference_mode()
def pack_linears(
    paged: PagedModel, kernels: CpuKernels, quantization: Quantization | None = None
) -> bool:
    """Replaces the linear layers of a model in place and frees their weights.

    A model that then computes something else, or reads a weight that is no longer there, gets its
    own layers back: False. That is tried with exact weights, also if others are wanted.
    """
    expected = probe_logits(paged, paged)
    originals = list(_linears(paged.transformer))
    for owner, name, linear in originals:
        setattr(owner, name, _packed(kernels, linear, None))
    try:
        actual = probe_logits(paged, paged)
        difference = ((actual - expected).abs().max() / expected.abs().max()).item()
    except (AttributeError, RuntimeError) as error:
        logger.info("linear layers are not packed: %s", error)
        difference = float("inf")
    same = difference <= TOLERANCE[paged.dtype]
    for owner, name, linear in originals:
        if not same:
            setattr(owner, name, linear)
        elif quantization:
            setattr(owner, name, _packed(kernels, linear, WEIGHTS[quantization]))
    return same


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is nn.Linear or type(child) is Conv1D:
                yield owner, name, child


def _packed(
    kernels: CpuKernels, linear: nn.Linear | Conv1D, storage: torch.dtype | None
) -> PackedLinear:
    weight = linear.weight if isinstance(linear, nn.Linear) else linear.weight.T
    return PackedLinear(kernels, weight, linear.bias, storage)
