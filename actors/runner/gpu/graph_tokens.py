"""Copies the tokens of decode steps to the host while later steps compute."""

from collections.abc import Callable

import torch

from rayfin.actors.messages import Int32Array


class SideStream:
    """Copies to pinned memory on a second CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Starts a copy after the work that is queued now; returns what waits for it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied = self._stream.record_event()
        wait: Callable[[], None] = copied.synchronize
        return wait


class GraphTokens:
    """The tokens that the steps of one multi-step call sampled, for up to ``max_rows`` rows.

    With a ``side`` stream they are copied while later work computes; without one, the device has
    computed them when they are read.
    """

    def __init__(
        self, max_num_steps: int, max_rows: int, device: torch.device, side: SideStream | None
    ) -> None:
        self._tokens = torch.zeros(max_num_steps, max_rows, dtype=torch.int64, device=device)
        self._side = side
        self._host = self._tokens
        self._wait: Callable[[], None] | None = None
        if side is not None:
            pinned = device.type == "cuda"
            self._host = torch.zeros(self._tokens.shape, dtype=torch.int64, pin_memory=pinned)

    def __len__(self) -> int:
        """The largest number of steps."""
        return len(self._tokens)

    def store(self, step: int, sampled: torch.Tensor) -> None:
        """Saves a step's tokens [B] int64, which the next step overwrites."""
        self._tokens[step, : len(sampled)].copy_(sampled)

    def send(self, num_steps: int) -> None:
        """Starts the copy of the first steps' tokens; nothing may be stored before ``collect``."""
        if self._side is not None:
            self._wait = self._side.copy(self._host[:num_steps], self._tokens[:num_steps])

    def wait(self) -> None:
        """Waits for the copy, not for work behind it."""
        if self._wait is not None:
            self._wait()

    def collect(self, num_steps: int, rows: int) -> Int32Array:
        """Waits and returns a copy [num_steps, R] of the first steps and rows."""
        self.wait()
        tokens: Int32Array = self._host[:num_steps, :rows].to("cpu", torch.int32, copy=True).numpy()
        return tokens
