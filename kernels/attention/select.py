"""Selects the attention backend of a device and a dtype."""

import logging
from typing import Any

import torch

from rayfin.kernels import reference
from rayfin.kernels.attention.torch_backend import paged_attention as torch_paged_attention
from rayfin.kernels.attention.write_kv import write_kv
from rayfin.kernels.cpu.attention import CpuAttention
from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.shapes import PagedAttention, PagedBatch
from rayfin.kernels.triton.available import can_use_triton

logger = logging.getLogger(__name__)

NAMES = ("auto", "cpu", "triton", "fa3", "torch", "reference")
ON_TRITON = ("auto", "triton", "fa3")
"""Those that use Triton's kernels on a GPU that has them."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def select_attention(
    device: torch.device,
    dtype: torch.dtype,
    name: str = "auto",
    kernels: CpuKernels | None = None,
) -> PagedAttention:
    """The backend called `name`, or for "auto" the fastest one for this device and dtype.

    "cpu" is the compiled backend with the threads of `kernels`; without `kernels` "auto" selects
    torch. "triton" needs a GPU. "fa3" is the same with FlashAttention 3 for prompts; "auto" takes
    that if it is installed and the GPU is one of Hopper's.

    Raises:
        ValueError: The backend does not exist, or does not support this device and dtype.
    """
    compiled = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    if name == "cpu" and not (compiled and kernels):
        raise ValueError(
            f"attention backend 'cpu' is not for {dtype} on {device.type}"
            if not compiled
            else "attention backend 'cpu' needs the compiled CPU kernels, which are not built"
        )
    if name in ("auto", "cpu") and compiled and kernels:
        return CpuAttention(kernels)
    on_gpu = can_use_triton(device)
    if name in ("triton", "fa3") and not on_gpu:
        raise ValueError(f"attention backend {name!r} needs a GPU and Triton, not {device.type!r}")
    if name in ON_TRITON and on_gpu:
        return _on_triton(device, name)
    if name in ("auto", "torch"):  # the torch backend takes every device and float dtype
        return torch_paged_attention
    if name == "reference":
        return reference.paged_attention
    raise ValueError(f"unknown attention backend {name!r}: choose one of {', '.join(NAMES)}")


def _on_triton(device: torch.device, name: str) -> PagedAttention:
    # Triton is not installed everywhere.
    from rayfin.kernels.attention.fa3 import load_fa3
    from rayfin.kernels.attention.triton_backend import TritonAttention

    prefill = None
    try:
        prefill = None if name == "triton" else load_fa3(device)
    except ValueError as error:
        if name == "fa3":
            raise
        logger.info("Triton attends in prompts too: %s", error)
    if name == "fa3" and prefill is None:
        raise ValueError(
            "attention backend 'fa3' needs a Hopper GPU (H100, H200) and FlashAttention 3, as of "
            "PyPI's package 'tokenspeed-fa3'"
        )
    return TritonAttention(device, prefill)


def why_refused(attention: PagedAttention) -> str:
    """Why a backend's kernel for prompts takes no layer that has asked; empty if it takes some."""
    refused: str = getattr(getattr(attention, "prefill", None), "refused", "")
    return refused


class SeeingAhead:
    """A backend, in place of which torch attends where tokens see later ones.

    Triton's kernels are causal. Such steps are rare: they hold images of some models.
    """

    def __init__(self, attention: PagedAttention) -> None:
        self._attention = attention
        self.page_types = page_types(attention)
        self.write_kv = getattr(attention, "write_kv", write_kv)

    def __call__(
        self,
        query: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        **settings: Any,
    ) -> torch.Tensor:
        """Implements `PagedAttention`."""
        attention = self._attention if batch.sees_to is None else torch_paged_attention
        return attention(query, k_pages, v_pages, batch, **settings)


def page_types(attention: PagedAttention) -> tuple[torch.dtype, ...]:
    """The dtypes of pages that a backend reads, for any dtype of queries."""
    types: tuple[torch.dtype, ...] = getattr(attention, "page_types", FLOATS)
    return types
