"""Checks that a page still holds what was written to it, before another request reads it."""

import numpy as np
import torch

from rayfin.actors import failpoints
from rayfin.actors.errors import PageCorrupted
from rayfin.actors.messages import SWAP_OUT, Int32Array, SchedulerInfo, StepResult
from rayfin.actors.runner.observers import Observer
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.shapes import to_device


class PageChecksums(Observer):
    """A sum over the bits of each full page, taken when it fills up and again when it is shared.

    A full page is not written again while a request may read it, so a changed sum is a fault; any
    one bit that flips changes it. Like ZFS, it checks on reading, not only on writing.
    """

    def __init__(self, cache: KVTensors, page_size: int, slots: RequestSlots) -> None:
        self._slots = slots
        self._page_size = page_size
        tensors = (*cache.keys, *cache.values)
        self._pages = [tensor.view(cache.num_pages, -1).view(torch.uint8) for tensor in tensors]
        self._sums = torch.zeros(cache.num_pages, dtype=torch.int64, device=cache.device)
        self._known = np.zeros(cache.num_pages, bool)

    def before(self, info: SchedulerInfo) -> None:
        """Checks the full pages that the step's new requests begin with.

        Raises:
            PageCorrupted: one has changed since it was filled.
        """
        written = info.moves[info.moves[:, 0] != SWAP_OUT]
        self._known[written[:, 2]] = False
        if info.new_requests:
            self._check(info)

    @torch.inference_mode()
    def after(self, info: SchedulerInfo, result: StepResult) -> None:
        """Takes the sums of the pages that the call's rows have filled up."""
        size, slots, sampled = self._page_size, self._slots, result.num_tokens
        # Each token of a decoding row but its last is in the cache; it has one from before.
        grown = np.where(info.is_decoding & (sampled > 0), sampled, info.chunk_len)
        length = info.kv_len + grown
        self._known[slots.page_tables[info.ids, (length - 1) // size]] = False  # perhaps half full
        pages = _pages(info, slots, info.kv_len // size, length // size)
        if len(pages):
            self._sums[self._index(pages)] = self._sum(pages)
            self._known[pages] = True

    def overwritten(self, pages: Int32Array) -> None:
        """Takes no sum: a file has its own."""
        self._known[pages] = False

    @torch.inference_mode()
    def _check(self, info: SchedulerInfo) -> None:
        new = np.isin(info.ids, [request.handle for request in info.new_requests])
        full = np.where(new, info.kv_len // self._page_size, 0)
        pages = np.unique(_pages(info, self._slots, np.zeros_like(full), full))
        pages = pages[self._known[pages]]
        if not len(pages):
            return
        if failpoints.ACTIVE and failpoints.ACTIVE.hit("runner.page") == "flip":
            self._pages[0][int(pages[0]), 0] ^= 1
        differ = self._sum(pages) != self._sums[self._index(pages)]
        if differ.any():
            bad = pages[differ.cpu().numpy()].tolist()
            raise PageCorrupted(f"pages {bad[:8]} are not what was written to them")

    def _sum(self, pages: Int32Array) -> torch.Tensor:
        """Sums [N] of pages [N], which wrap around."""
        index = self._index(pages)
        total = torch.zeros(len(pages), dtype=torch.int64, device=index.device)
        # A factor for each tensor: two of them that change places give another sum.
        for at, tensor in enumerate(self._pages):
            bits = tensor.index_select(0, index)
            wide = bits.view(torch.int32) if bits.shape[1] % 4 == 0 else bits
            total += (2 * at + 1) * wide.sum(1, dtype=torch.int64)
        return total

    def _index(self, pages: Int32Array) -> torch.Tensor:
        return to_device(pages.astype(np.int64), self._sums.device)


def _pages(
    info: SchedulerInfo, slots: RequestSlots, first: Int32Array, last: Int32Array
) -> Int32Array:
    """Page ids of columns ``first`` up to ``last`` [R] of the rows' tables."""
    rows = np.flatnonzero(last > first)
    pages = [slots.page_tables[info.ids[row], first[row] : last[row]] for row in rows]
    return np.concatenate(pages) if pages else np.zeros(0, np.int32)
