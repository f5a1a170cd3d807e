"""Sampling with the compiled CPU kernels: greedy rows in one read of the logits."""

import torch

from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.sampling.sample import SamplingRows, sample


def sample_on_cpu(kernels: CpuKernels, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """`rayfin.kernels.sampling.sample.sample` for a CPU: [S, V] fp32 -> [S] int64."""
    dense = logits.dtype == torch.float32 and logits.stride(-1) == 1
    return kernels.highest(logits) if rows.all_greedy and dense else sample(logits, rows)
