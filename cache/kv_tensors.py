"""The memory of the pages: one tensor of keys and one of values per layer, or shared by groups."""

import copy
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rayfin.cache.window_tables import WindowGroups

HUGE_BYTES = 8 << 20
"""Tensors of at least this size are put on huge pages if the system has them."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one layer stores per token."""

    kv_heads: int
    key_dim: int
    value_dim: int
    # Tokens that its attention sees at most; None: all. No part of what the pages hold.
    window: int | None = field(default=None, repr=False)

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page of this layer, keys and values."""
        return self.kv_heads * (self.key_dim + self.value_dim) * page_size * dtype.itemsize


MOST_PADDING = 1.25
"""Layers are grouped only where all groups together have at most so many times their layers."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Layers in groups of which each takes pages of its own; all pages have the same bytes.

    Layer i of one group and layer i of another share their tensors: a page is one group's.
    """

    windows: WindowGroups
    group: tuple[int, ...]  # of each layer: 0 is the group that sees all, if there is one
    place: tuple[int, ...]  # of each layer in its group: the number of its tensors

    @property
    def size(self) -> int:
        """Layers of the largest group."""
        return max(self.place) + 1


def group_layers(layouts: Sequence[KVLayout]) -> LayerGroups | None:
    """Groups layers by what they see; None where no pages could be freed for it.

    Layers that see all are one group. Those with windows are groups of as many layers beside it,
    the last one perhaps of fewer, so that a page of any group has the same bytes.
    """
    full = [index for index, layout in enumerate(layouts) if layout.window is None]
    seeing = [index for index, layout in enumerate(layouts) if layout.window is not None]
    if not seeing:
        return None
    widest = max(layout.window or 0 for layout in layouts)
    if not full:
        layers = range(len(layouts))
        return LayerGroups(WindowGroups(widest, 0), (0,) * len(layouts), tuple(layers))
    sizes = {(layout.kv_heads, layout.key_dim, layout.value_dim) for layout in layouts}
    size = len(full)
    beside = -(-len(seeing) // size)
    if len(sizes) > 1 or (1 + beside) * size > MOST_PADDING * len(layouts):
        return None
    group, place = [0] * len(layouts), [0] * len(layouts)
    for number, index in enumerate(full):
        place[index] = number
    for number, index in enumerate(seeing):
        group[index], place[index] = 1 + number // size, number % size
    return LayerGroups(WindowGroups(widest, beside), tuple(group), tuple(place))


class KVTensors:
    """Paged keys [num_pages, page_size, kv_heads, key_dim] and values of every layer.

    Layers of several ``groups`` share tensors; ``group`` has the group of each layer.

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
        groups: LayerGroups | None = None,
    ) -> None:
        self.group = (0,) * len(layouts) if groups is None else groups.group
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device

        def pages(heads: int, dim: int) -> torch.Tensor:
            shape = (num_pages, page_size, heads, dim)
            if device.type == "cpu" and not pinned:
                return _zeros(shape, dtype)
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        place: Sequence[int] = range(len(layouts)) if groups is None else groups.place
        kept = dict(zip(place, layouts, strict=True))
        keys = {number: pages(kv.kv_heads, kv.key_dim) for number, kv in kept.items()}
        values = {number: pages(kv.kv_heads, kv.value_dim) for number, kv in kept.items()}
        self.keys: list[torch.Tensor] = [keys[number] for number in place]
        self.values: list[torch.Tensor] = [values[number] for number in place]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All keys, then all values, each tensor once."""
        return list({id(pages): pages for pages in (*self.keys, *self.values)}.values())

    def layers(self, start: int, end: int) -> "KVTensors":
        """The same memory, seen as the layers [start, end) alone."""
        part = copy.copy(self)
        part.keys, part.values = self.keys[start:end], self.values[start:end]
        part.group = self.group[start:end]
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
