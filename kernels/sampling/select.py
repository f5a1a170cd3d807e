"""Selects the sampling function of a device."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.sampling.filters import allow_bits
from rayfin.kernels.sampling.sample import sample
from rayfin.kernels.shapes import SamplingRows, TokenBits
from rayfin.kernels.triton.available import can_use_triton


class SampleTokens(Protocol):
    """`sample.sample` where rows may not take every token; a row without one gets -1.

    The tokens [S] are on the host, which waits for them.
    """

    def __call__(
        self, logits: torch.Tensor, rows: SamplingRows, allowed: TokenBits | None = None
    ) -> npt.NDArray[np.int64]: ...


def select_sample(
    device: torch.device, name: str = "auto", kernels: CpuKernels | None = None
) -> SampleTokens:
    """The sampling function for an attention backend's name.

    It is the Triton one on a GPU, the compiled one with ``kernels``, else torch's `sample`.
    """
    if name in ("auto", "triton", "fa3") and can_use_triton(device):
        from rayfin.kernels.triton.sample import sample as triton_sample  # not installed everywhere

        return partial(sample_allowed, triton_sample)
    return partial(sample_allowed, sample) if kernels is None else partial(sample_on_cpu, kernels)


def sample_allowed(
    sample: Callable[[torch.Tensor, SamplingRows], torch.Tensor],
    logits: torch.Tensor,
    rows: SamplingRows,
    allowed: TokenBits | None = None,
) -> npt.NDArray[np.int64]:
    """``sample`` of a copy of the logits without the tokens that are not allowed."""
    tokens = sample(logits if allowed is None else allow_bits(logits, allowed), rows)
    host: npt.NDArray[np.int64] = tokens.cpu().numpy()
    return host


def sample_on_cpu(
    kernels: CpuKernels,
    logits: torch.Tensor,
    rows: SamplingRows,
    allowed: TokenBits | None = None,
) -> npt.NDArray[np.int64]:
    """`sample` for a CPU: [S, V] fp32 -> [S]. Greedy rows take one pass over the logits."""
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        return sample_allowed(sample, logits, rows, allowed)
    if rows.all_greedy:
        return kernels.highest(logits, allowed)
    if allowed is not None:
        logits = kernels.copy_allowed(logits, allowed)
    return sample_allowed(sample, logits, rows)
