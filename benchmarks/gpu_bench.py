"""The device of the GPU benchmarks, and the timing of one operation."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSHED = 256 << 20
"""Bytes written before an operation is timed, several times an H200's L2 cache."""

BUSY_CYCLES = 1_000_000
"""Cycles that the device is busy, about half a millisecond, while an operation is queued."""


@dataclass(frozen=True)
class Bench:
    """The device, its limits, and the size of the benchmarks."""

    device: torch.device
    dtype: torch.dtype
    bandwidth: float  # bytes/s
    flops: float
    toy: bool

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the median time of several runs, on a GPU the device's time.

        On a GPU, the L2 cache is flushed before each run, as in a model of many layers, and the run
        is queued while the device is busy, so that launch time does not count.
        """
        for _ in range(1 if self.toy else 5):
            run()
        times = []
        for _ in range(2 if self.toy else 30):
            self.wait()
            started = time.perf_counter()
            if self.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.zeros(FLUSHED, dtype=torch.uint8, device=self.device)
                torch.cuda._sleep(BUSY_CYCLES)
                start.record()
                run()
                end.record()
                self.wait()
                times.append(start.elapsed_time(end) / 1e3)
            else:
                run()
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
