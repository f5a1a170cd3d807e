"""Copies the tokens of decode steps to the host while later steps compute."""

import torch

from rayfin.actors.messages import Int32Array


class SideStream:
    """Copies to pinned memory on a second CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts a copy after the work that is queued now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Waits for all copies."""
        self._stream.synchronize()


class GraphTokens:
    """The tokens that the steps of one multi-step call sampled, for up to ``max_rows`` rows.

    With a ``side`` stream each step's tokens are copied as soon as they are sampled, in order;
    without one, all are copied at the end.
    """

    def __init__(
        self, max_num_steps: int, max_rows: int, device: torch.device, side: SideStream | None
    ) -> None:
        self._tokens = torch.zeros(max_num_steps, max_rows, dtype=torch.int64, device=device)
        self._side = side
        self._host = self._tokens
        if side is not None:
            pinned = device.type == "cuda"
            self._host = torch.zeros(self._tokens.shape, dtype=torch.int64, pin_memory=pinned)

    def __len__(self) -> int:
        """The largest number of steps."""
        return len(self._tokens)

    def store(self, step: int, sampled: torch.Tensor) -> None:
        """Saves a step's tokens [B] int64, which the next step overwrites."""
        stored = self._tokens[step, : len(sampled)]
        stored.copy_(sampled)
        if self._side is not None:
            self._side.copy(self._host[step, : len(sampled)], stored)

    def collect(self, num_steps: int, rows: int) -> Int32Array:
        """Waits for all copies and returns a copy [num_steps, R] of the first steps and rows.

        The next multi-step call overwrites the buffers.
        """
        if self._side is not None:
            self._side.wait()
        tokens: Int32Array = self._host[:num_steps, :rows].to("cpu", torch.int32, copy=True).numpy()
        return tokens
