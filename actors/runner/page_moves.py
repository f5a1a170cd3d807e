"""Makes a step's page moves: copies on the device, and ways to host memory and back."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rayfin.actors.messages import (
    COPY,
    STATE_COPY,
    STATE_LOAD,
    STATE_SAVE,
    SWAP_IN,
    SWAP_OUT,
    Int32Array,
)
from rayfin.actors.runner.state_tensors import StateTensors
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.shapes import to_device

MOST_AT_ONCE = 1024
"""Pages moved together: bounds the memory that they pass through, which is one layer's share."""


class PageMover:
    """Moves pages within ``device`` and between it and ``host``.

    On a GPU every copy is queued without a wait: copies within it on its current stream, swaps
    beside that one in the order that `CopyStream` argues. A page is back where it is wanted before
    the step that reads it, and out before the one that writes over it.
    """

    def __init__(
        self, device: KVTensors, host: KVTensors, states: StateTensors | None = None
    ) -> None:
        self._device = device.device
        self._states = states
        self._stream = CopyStream(device.device)
        both = zip(device.tensors, host.tensors, strict=True)
        self._pairs = [(_movable(pages), _movable(copies)) for pages, copies in both]

    @torch.inference_mode()
    def run(self, moves: Int32Array) -> None:
        """Makes the moves [M, 3] of ``SchedulerInfo.moves`` as if one after another."""
        make: dict[int, Callable[[Any, Any], None]] = {
            COPY: self._copy,
            SWAP_OUT: self._swap_out,
            SWAP_IN: self._swap_in,
        }
        if self._states is not None:
            make |= {
                STATE_COPY: self._states.copy,
                STATE_SAVE: self._states.save,
                STATE_LOAD: self._states.load,
            }
        for kind, sources, targets in runs(moves):
            make[kind](sources, targets)

    def beside(self) -> "PageMover":
        """Another one of the same pages, for ``run_beside`` on a thread beside the steps."""
        other = copy.copy(self)
        other._stream = CopyStream(self._device, behind=self._stream)
        return other

    def run_beside(self, moves: Int32Array) -> None:
        """Makes moves behind all that is queued, while steps go on; returns when they are made."""
        with self._stream.beside():
            self.run(moves)

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
        depends = target in written or (kind in (COPY, STATE_COPY) and source in written)
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


# Copies between a GPU and pinned host memory, on a stream beside the one that computes.

MOST_UNDER_WAY = 256 << 20
"""Bytes of tensors that are on their way out, or in: more, and one stream waits for the other."""


@dataclass(slots=True)
class _Held:
    """Tensors that one stream owns and another still uses, oldest first, with the use's end."""

    tensors: deque[tuple[torch.Tensor, torch.cuda.Event]] = field(default_factory=deque)
    bytes: int = 0

    def hold(self, tensor: torch.Tensor, owner: torch.cuda.Stream, user: torch.cuda.Stream) -> None:
        """Keeps ``tensor`` until its ``owner`` cannot write over it before ``user`` is done."""
        self.tensors.append((tensor, user.record_event()))
        self.bytes += tensor.nbytes
        while self.tensors:
            oldest, used = self.tensors[0]
            if not used.query():  # type: ignore[no-untyped-call]
                if self.bytes <= MOST_UNDER_WAY:
                    break
                owner.wait_event(used)
            self.bytes -= oldest.nbytes
            self.tensors.popleft()


class CopyStream:
    """The order of swap copies; the host waits for none of them. On a CPU, nothing.

    Host pages are touched by this stream alone, so what goes out to one and comes in again, or goes
    out after it came in, does so in the order of the calls. A copy out begins when the computing
    stream has gathered its pages, which later steps may then write over; a copy in may begin while
    earlier steps compute, and the computing stream waits for it before it uses what came. The
    tensors in between go back to their stream's memory only behind the other one's use of them
    (`_Held`), which bounds them, where ``record_stream`` would not: the host is ahead of both.
    """

    def __init__(self, device: torch.device, behind: "CopyStream | None" = None) -> None:
        self._device, self._behind = device, behind
        make: Any = torch.cuda.Stream  # which torch leaves without types
        self._side: torch.cuda.Stream | None = make(device) if device.type == "cuda" else None
        self._out, self._in = _Held(), _Held()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Within it, another thread than that of the steps copies, and no step waits for it.

        It begins behind the steps and their swaps so far; at its end all copies are made.
        """
        if self._side is None:
            yield
            return
        make: Any = torch.cuda.Stream
        compute = make(self._device)
        compute.wait_stream(torch.cuda.default_stream(self._device))
        if self._behind is not None and self._behind._side is not None:
            compute.wait_stream(self._behind._side)
        self._side.wait_stream(compute)
        with torch.cuda.stream(compute):
            yield
        self._side.synchronize()
        compute.synchronize()

    @contextmanager
    def out(self, gathered: torch.Tensor) -> Iterator[None]:
        """Within it, ``gathered`` is copied to host memory."""
        if self._side is None:
            yield
            return
        compute = torch.cuda.current_stream(self._device)
        self._side.wait_stream(compute)
        with torch.cuda.stream(self._side):
            yield
        self._out.hold(gathered, compute, self._side)

    @contextmanager
    def into(self) -> Iterator[None]:
        """Within it, a tensor is made and host memory is copied to it; behind it, it is there."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    def used(self, arrived: torch.Tensor) -> None:
        """All that uses a tensor made within ``into`` is queued."""
        if self._side is not None:
            self._in.hold(arrived, self._side, torch.cuda.current_stream(self._device))
