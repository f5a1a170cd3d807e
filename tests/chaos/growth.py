"""What processes hold, sampled over time, and whether it grows: slopes by least squares."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HOUR = 3600.0


@dataclass(slots=True)
class Series:
    """One quantity over time."""

    name: str
    times: list[float] = field(default_factory=list)  # seconds
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.times.append(at)
        self.values.append(value)

    def per_hour(self) -> float:
        """Its slope by least squares, as a share of its mean, for an hour; 0 of one sample."""
        if len(self.times) < 2 or not any(self.values):
            return 0.0
        slope = float(np.polyfit(np.array(self.times) - self.times[0], self.values, 1)[0])
        return HOUR * slope / float(np.mean(self.values))


@dataclass(slots=True)
class Growth:
    """Series by name; the first ``skip`` samples are of a system that is still warming up."""

    skip: int = 0
    series: dict[str, Series] = field(default_factory=dict)
    _seen: int = 0

    def add(self, at: float, values: dict[str, float]) -> None:
        self._seen += 1
        if self._seen > self.skip:
            for name, value in values.items():
                self.series.setdefault(name, Series(name)).add(at, value)

    def lines(self, most: float) -> tuple[list[str], list[str]]:
        """(all of them in words, names of those that grow by more than ``most`` an hour)."""
        told, grown = [], []
        for name, series in sorted(self.series.items()):
            slope = series.per_hour()
            first, last = series.values[0], series.values[-1]
            told.append(f"{name:24} {first:10,.1f} -> {last:10,.1f}  {100 * slope:+.2f} %/h")
            if slope > most and last > first:
                grown.append(name)
        return told, grown


def held_by(pids: Sequence[int]) -> dict[str, float]:
    """What processes hold together: MiB resident, file descriptors, threads; of those that live."""
    total = {"RSS MiB": 0.0, "fds": 0.0, "threads": 0.0}
    for pid in pids:
        folder = Path(f"/proc/{pid}")
        try:
            status = dict(line.split(":", 1) for line in folder.joinpath("status").open())
            total["fds"] += len(os.listdir(folder / "fd"))
        except OSError:  # it has ended
            continue
        total["RSS MiB"] += int(status.get("VmRSS", "0 kB").split()[0]) / 1024
        total["threads"] += int(status["Threads"])
    return total
