"""Makes a step's page moves: copies on the device, and ways to host memory and back."""

from collections.abc import Iterator

import numpy as np
import torch

from rayfin.actors.messages import COPY, SWAP_IN, SWAP_OUT, Int32Array
from rayfin.actors.runner.copy_stream import CopyStream
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.staging import to_device

MOST_AT_ONCE = 1024
"""Pages moved together: bounds the memory that they pass through, which is one layer's share."""


class PageMover:
    """Moves pages within ``device`` and between it and ``host``.

    On a GPU everything is queued, and nobody waits: copies within it on its current stream, swaps
    beside that one in the order that `CopyStream` argues. A page is back where it is wanted before
    the step that reads it, and out before the one that writes over it.
    """

    def __init__(self, device: KVTensors, host: KVTensors) -> None:
        self._device = device.device
        self._stream = CopyStream(device.device)
        both = zip([*device.keys, *device.values], [*host.keys, *host.values], strict=True)
        self._pairs = [(_movable(pages), _movable(copies)) for pages, copies in both]

    @torch.inference_mode()
    def run(self, moves: Int32Array) -> None:
        """Makes the moves [M, 3] of ``SchedulerInfo.moves`` as if one after another."""
        make = {COPY: self._copy, SWAP_OUT: self._swap_out, SWAP_IN: self._swap_in}
        for kind, sources, targets in runs(moves):
            make[kind](sources, targets)

    def _copy(self, sources: Int32Array, targets: Int32Array) -> None:
        from_, to = self._index(sources), self._index(targets)
        for pages, _ in self._pairs:
            pages.index_copy_(0, to, pages.index_select(0, from_))

    def _swap_out(self, sources: Int32Array, targets: Int32Array) -> None:
        from_, spans = self._index(sources), contiguous(targets)
        for pages, host in self._pairs:
            gathered = pages.index_select(0, from_)
            with self._stream.out(gathered):
                for at, first, last in spans:
                    part = gathered[at : at + last - first]
                    host[first:last].copy_(part, non_blocking=True)

    def _swap_in(self, sources: Int32Array, targets: Int32Array) -> None:
        to, spans = self._index(targets), contiguous(sources)
        for pages, host in self._pairs:
            with self._stream.into():
                arrived = pages.new_empty(len(targets), *pages.shape[1:])
                for at, first, last in spans:
                    part = arrived[at : at + last - first]
                    part.copy_(host[first:last], non_blocking=True)
            pages.index_copy_(0, to, arrived)
            self._stream.used(arrived)

    def _index(self, pages: Int32Array) -> torch.Tensor:
        return to_device(pages.astype(np.int64), self._device)


def _movable(pages: torch.Tensor) -> torch.Tensor:
    """The same memory; fp8 as bytes, since torch does not copy it by index."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


def runs(moves: Int32Array) -> Iterator[tuple[int, Int32Array, Int32Array]]:
    """(kind, sources [N], targets [N]) of consecutive moves that can be made at once.

    All sources of a run are read before any target is written, so a run ends before a move that
    reads what an earlier one of it wrote, or that writes to the same page again.
    """
    start = 0
    written: set[int] = set()
    for index, (kind, source, target) in enumerate(moves.tolist()):
        depends = target in written or (kind == COPY and source in written)
        if written and (kind != moves[start, 0] or depends or index - start == MOST_AT_ONCE):
            yield int(moves[start, 0]), moves[start:index, 1], moves[start:index, 2]
            start = index
            written.clear()
        written.add(target)
    if len(moves):
        yield int(moves[start, 0]), moves[start:, 1], moves[start:, 2]


def contiguous(pages: Int32Array) -> list[tuple[int, int, int]]:
    """``pages`` [N] as (index in it, first page, one past the last) of consecutive ids."""
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(pages)]
    return [
        (start, int(pages[start]), int(pages[start]) + end - start)
        for start, end in zip(starts, ends, strict=True)
    ]
