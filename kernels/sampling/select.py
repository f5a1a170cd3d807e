"""Which sampling a device gets."""

from collections.abc import Callable

import torch

from rayfin.kernels.sampling.sample import SamplingRows, sample
from rayfin.kernels.triton.available import can_use_triton

Sample = Callable[[torch.Tensor, SamplingRows], torch.Tensor]


def select_sample(device: torch.device, name: str = "auto") -> Sample:
    """Of the attention backend's name, torch's `sample`, or on a GPU the one without a sort."""
    if name in ("auto", "triton") and can_use_triton(device):
        from rayfin.kernels.triton.sample import sample as triton_sample  # not installed everywhere

        return triton_sample
    return sample
