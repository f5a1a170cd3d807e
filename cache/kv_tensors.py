"""The memory of the pages: one tensor of keys and one of values per layer."""

import copy
import mmap
from dataclasses import dataclass

import torch

HUGE_BYTES = 8 << 20
"""Tensors of at least this size are put on huge pages if the system has them."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one layer stores per token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page of this layer, keys and values."""
        return self.kv_heads * (self.key_dim + self.value_dim) * page_size * dtype.itemsize


class KVTensors:
    """Paged keys [num_pages, page_size, kv_heads, key_dim] and values of every layer.

    The tensors are allocated once, zeroed (unwritten memory must not hold a NaN) and never resized.
    On a CPU they take no physical memory until pages are written or ``PagePrefaulter`` touches them
    (2 MiB at a time), unless they are ``pinned`` for copies to and from a GPU.
    """

    def __init__(
        self,
        layouts: list[KVLayout],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        pinned: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device

        def pages(heads: int, dim: int) -> torch.Tensor:
            shape = (num_pages, page_size, heads, dim)
            if device.type == "cpu" and not pinned:
                return _zeros(shape, dtype)
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.keys: list[torch.Tensor] = [pages(kv.kv_heads, kv.key_dim) for kv in layouts]
        self.values: list[torch.Tensor] = [pages(kv.kv_heads, kv.value_dim) for kv in layouts]

    def layers(self, start: int, end: int) -> "KVTensors":
        """The same memory, seen as the layers [start, end) alone."""
        part = copy.copy(self)
        part.keys, part.values = self.keys[start:end], self.values[start:end]
        return part


def page_bytes(layouts: list[KVLayout], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page of all layers."""
    return sum(layout.page_bytes(page_size, dtype) for layout in layouts)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # A step reads small pieces all over the cache, and each would miss the TLB. On huge pages
    # attention is a tenth to a fifth faster.
    size = torch.Size(shape).numel() * dtype.itemsize
    if size < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, OverflowError):  # no huge pages, or no memory: then torch raises
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # the tensor keeps `memory`
