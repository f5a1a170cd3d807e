"""Selects the sampling function of a device."""

from collections.abc import Callable
from functools import partial

import torch

from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.sampling.sample import sample
from rayfin.kernels.shapes import SamplingRows
from rayfin.kernels.triton.available import can_use_triton

Sample = Callable[[torch.Tensor, SamplingRows], torch.Tensor]


def select_sample(
    device: torch.device, name: str = "auto", kernels: CpuKernels | None = None
) -> Sample:
    """The sampling function for an attention backend's name.

    It is the Triton one on a GPU, the compiled one with ``kernels``, else torch's `sample`.
    """
    if name in ("auto", "triton") and can_use_triton(device):
        from rayfin.kernels.triton.sample import sample as triton_sample  # not installed everywhere

        return triton_sample
    return sample if kernels is None else partial(sample_on_cpu, kernels)


def sample_on_cpu(kernels: CpuKernels, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """`sample` for a CPU: [S, V] fp32 -> [S] int64. Greedy rows take one pass over the logits."""
    dense = logits.dtype == torch.float32 and logits.stride(-1) == 1
    return kernels.highest(logits) if rows.all_greedy and dense else sample(logits, rows)
