"""The device of the GPU benchmarks, the timing of one operation, and the rows that come of it."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

FLUSHED = 256 << 20
"""Bytes read before an operation is timed, several times an H200's L2 cache.

What is written would have to leave the cache while the operation is timed.
"""

BUSY_CYCLES = 1_000_000
"""Cycles that the device is busy, about half a millisecond, while an operation is queued."""


@cache
def _bytes_to_read(device: torch.device) -> torch.Tensor:
    return torch.zeros(FLUSHED // 4, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Bench:
    """The device, its limits, and the size of the benchmarks."""

    device: torch.device
    dtype: torch.dtype
    bandwidth: float  # bytes/s
    flops: float
    toy: bool
    out: Path | None = None  # JSON lines are appended to it

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

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
            if self.on_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                _bytes_to_read(self.device).max()
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
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def kernels(self, run: Callable[[], object]) -> dict[str, tuple[int, float]]:
        """Name -> (launches, microseconds) of what a run has the GPU do; nothing on a CPU."""
        if not self.on_gpu:
            run()
            return {}
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            self.wait()
        count: Counter[str] = Counter()
        took: Counter[str] = Counter()
        for event in profiler.events():
            if event.device_type == DeviceType.CUDA:
                count[event.name] += 1
                took[event.name] += event.time_range.elapsed_us()
        return {name: (count[name], took[name]) for name, _ in took.most_common()}

    def expect(self, kernel: str, run: Callable[[], object]) -> None:
        """Raises if a run on a GPU does not launch the kernel: something else would be timed."""
        names = self.kernels(run)
        if self.on_gpu and not any(kernel in name for name in names):
            raise AssertionError(f"{kernel} is not among what is timed: {', '.join(names)}")

    def table(self, section: str, title: str, columns: Sequence[str], note: str = "") -> "Table":
        """Begins a table; its rows are kept as soon as they are there."""
        return Table(self, section, title, columns, note)

    def keep(self, section: str, row: dict[str, object]) -> None:
        """Appends a row to the file, so that a run that is killed loses none."""
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps({"section": section, **row}) + "\n")


class Table:
    """Prints rows under a heading, and keeps each at once."""

    def __init__(
        self, bench: Bench, section: str, title: str, columns: Sequence[str], note: str
    ) -> None:
        self._bench, self._section, self._columns = bench, section, columns
        print(f"\n## {title}\n")
        if note:
            print(f"{note}\n")
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def add(self, *values: object) -> None:
        """A row, of a value for each column."""
        print(f"| {' | '.join(map(str, values))} |", flush=True)
        row = dict(zip(self._columns, values, strict=True))
        self._bench.keep(self._section, row)
