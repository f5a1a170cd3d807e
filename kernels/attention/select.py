"""Which attention backend a device and a dtype get."""

import torch

from rayfin.kernels import reference
from rayfin.kernels.attention.interface import PagedAttention
from rayfin.kernels.attention.torch import paged_attention as torch_paged_attention

NAMES = ("auto", "torch", "reference")


def select_attention(
    device: torch.device, dtype: torch.dtype, name: str = "auto"
) -> PagedAttention:
    """The backend called `name`, or with "auto" the fastest one for this device and dtype.

    Raises:
        ValueError: no backend of that name.
    """
    if name in ("auto", "torch"):  # the torch backend takes every device and float dtype
        return torch_paged_attention
    if name == "reference":
        return reference.paged_attention
    raise ValueError(f"unknown attention backend {name!r}: choose one of {', '.join(NAMES)}")
