"""Copies between a GPU and pinned host memory, on a stream beside the one that computes."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

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
    """The order of swap copies, of which nobody on the host waits for one. On a CPU, nothing.

    Host pages are touched by this stream alone, so what goes out to one and comes in again, or goes
    out after it came in, does so in the order of the calls. A copy out begins when the computing
    stream has gathered its pages, which later steps may then write over; a copy in may begin while
    earlier steps compute, and the computing stream waits for it before it uses what came. The
    tensors in between go back to their stream's memory only behind the other one's use of them
    (`_Held`), which bounds them, where ``record_stream`` would not: the host is ahead of both.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make: Any = torch.cuda.Stream  # which torch leaves without types
        self._side: torch.cuda.Stream | None = make(device) if device.type == "cuda" else None
        self._out, self._in = _Held(), _Held()

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
