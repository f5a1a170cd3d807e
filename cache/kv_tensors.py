"""The memory behind the page ids: one tensor of keys and one of values per layer."""

from dataclasses import dataclass

import torch


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

    Allocated once, zeroed (memory that was never written must not hold a NaN), never resized. On a
    CPU the zero pages take no physical memory until they are written, unless they are ``pinned``
    for copies to and from a GPU.
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
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.keys = [pages(kv.kv_heads, kv.key_dim) for kv in layouts]
        self.values = [pages(kv.kv_heads, kv.value_dim) for kv in layouts]


def page_bytes(layouts: list[KVLayout], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page of all layers (DESIGN 6's formula, with key and value sizes apart)."""
    return sum(layout.page_bytes(page_size, dtype) for layout in layouts)
