"""Copies what decode steps have sampled to the host while later steps compute."""

from collections.abc import Callable

import torch

from rayfin.actors.messages import Int32Array, Int64Array
from rayfin.actors.runner.gpu.graph_extras import OUTPUTS, GraphLogprobs


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
    """The tokens that the steps of one multi-step call sampled, for up to ``max_rows`` rows, and
    the log probabilities that were asked for.

    With a ``side`` stream they are copied while later work computes; without one, the device has
    computed them when they are read.
    """

    def __init__(
        self, max_num_steps: int, max_rows: int, device: torch.device, side: SideStream | None
    ) -> None:
        shape = max_num_steps, max_rows
        self._kept = [torch.zeros(shape, dtype=torch.int64, device=device)]
        for width, dtype in OUTPUTS:
            self._kept.append(torch.zeros(*shape, width, dtype=dtype, device=device))
        self._side = side
        self._host = self._kept
        self._waits: list[Callable[[], None]] = []
        if side is not None:
            pinned = device.type == "cuda"
            self._host = [
                torch.zeros(each.shape, dtype=each.dtype, pin_memory=pinned) for each in self._kept
            ]

    def __len__(self) -> int:
        """The largest number of steps."""
        return len(self._kept[0])

    def store(self, step: int, *outputs: torch.Tensor) -> None:
        """Saves what a step gives, which the next step overwrites: tokens [B] int64, and log
        probabilities as `GraphExtras.outputs`, if a row asks for some."""
        for kept, output in zip(self._kept, outputs, strict=False):
            kept[step, : len(output)].copy_(output)

    def send(self, num_steps: int, *, logprobs: bool = False) -> None:
        """Starts the copy of the first steps' outputs; nothing may be stored before ``collect``."""
        if self._side is not None:
            pairs = list(zip(self._host, self._kept, strict=True))[: None if logprobs else 1]
            self._waits = [
                self._side.copy(host[:num_steps], kept[:num_steps]) for host, kept in pairs
            ]

    def wait(self) -> None:
        """Waits for the copies, not for work behind them."""
        for wait in self._waits:
            wait()

    def collect(self, num_steps: int, rows: int) -> Int32Array:
        """Waits and returns a copy [num_steps, R] of the first steps and rows."""
        self.wait()
        host = self._host[0][:num_steps, :rows]
        tokens: Int32Array = host.to("cpu", torch.int32, copy=True).numpy()
        return tokens

    def logprobs(self, num_steps: int, num_logprobs: Int64Array) -> GraphLogprobs:
        """A copy of the log probabilities, of what has been collected."""
        rows = slice(len(num_logprobs))
        values, numbers = (
            host[:num_steps, rows].to("cpu", copy=True).numpy() for host in self._host[1:]
        )
        return GraphLogprobs(num_logprobs, values, numbers)
