"""The tokens of a lease's steps, brought to the host while later steps compute."""

import torch

from rayfin.actors.messages import Int32Array


class SideStream:
    """Copies to pinned memory beside the stream that computes, on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begun when what computes now has written the source."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Until all copies have been made."""
        self._stream.synchronize()


class GraphTokens:
    """What the steps of one lease sampled, for up to ``max_rows`` rows.

    With a ``side`` each step's tokens leave the device as soon as they are known, in the order of
    steps; without one, all of them at the end.
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
        """Steps that there is room for."""
        return len(self._tokens)

    def store(self, step: int, sampled: torch.Tensor) -> None:
        """Puts a step's tokens [B] int64 aside: the next step overwrites them."""
        stored = self._tokens[step, : len(sampled)]
        stored.copy_(sampled)
        if self._side is not None:
            self._side.copy(self._host[step, : len(sampled)], stored)

    def collect(self, num_steps: int, rows: int) -> Int32Array:
        """[lease, R] of the first steps and rows, copied: the next lease writes to the same place.

        It waits for them; that no copy is under way afterwards lets the next lease begin.
        """
        if self._side is not None:
            self._side.wait()
        tokens: Int32Array = self._host[:num_steps, :rows].to("cpu", torch.int32, copy=True).numpy()
        return tokens
