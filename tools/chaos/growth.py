"""Samples what processes hold over time and fits its growth by least squares."""

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HOUR = 3600.0
MAX_GROWTH = 0.01  # per hour, as a share
LONG_ENOUGH = 30.0  # minutes: the slopes of a shorter run are noise


@dataclass(slots=True)
class Series:
    """One quantity over time. A new process starts a new *life*, with a new level."""

    name: str
    times: list[float] = field(default_factory=list)  # seconds
    values: list[float] = field(default_factory=list)
    lives: list[Hashable] = field(default_factory=list)

    def add(self, at: float, value: float, life: Hashable = None) -> None:
        self.times.append(at)
        self.values.append(value)
        self.lives.append(life)

    def per_hour(self) -> tuple[float, float]:
        """Returns the slope per hour and its standard error, as shares of the mean.

        Least squares with one slope for all lives and a level for each; zeros for one sample.
        """
        times, values = np.array(self.times), np.array(self.values)
        if not np.any(values):
            return 0.0, 0.0
        mean = float(values.mean())
        numbers = np.unique([str(life) for life in self.lives], return_inverse=True)[1]
        for number in range(numbers.max() + 1):
            life = numbers == number
            times[life] -= times[life].mean()
            values[life] -= values[life].mean()
        spread = float((times**2).sum())
        if not spread:
            return 0.0, 0.0
        slope = float((times * values).sum()) / spread
        freedom = max(1, len(times) - numbers.max() - 2)
        error = float(np.sqrt(((values - slope * times) ** 2).sum() / freedom / spread))
        return HOUR * slope / mean, HOUR * error / mean


@dataclass(slots=True)
class Growth:
    """Series by name. The first ``skip`` seconds of each life are a warm-up and do not count."""

    skip: float = 0.0
    series: dict[str, Series] = field(default_factory=dict)
    _began: dict[tuple[str, Hashable], float] = field(default_factory=dict)

    def add(
        self, at: float, values: dict[str, float], lives: Mapping[str, Hashable] | None = None
    ) -> None:
        """Adds values; ``lives`` maps the first word of a name to the current life."""
        for name, value in values.items():
            life = (lives or {}).get(name.split()[0])
            if at - self._began.setdefault((name, life), at) >= self.skip:
                self.series.setdefault(name, Series(name)).add(at, value, life)

    def lines(self, limit: float) -> tuple[list[str], list[str]]:
        """Returns a line for each series, and the names of those that grow.

        A series grows if its slope exceeds ``limit`` per hour by more than two standard errors.
        """
        texts, grown = [], []
        for name, series in sorted(self.series.items()):
            slope, error = series.per_hour()
            first, last, lives = series.values[0], series.values[-1], len(set(series.lives))
            texts.append(
                f"{name:24} {first:8,.1f} -> {last:8,.1f}  {100 * slope:+7.2f} +- {100 * error:.2f}"
                f" %/h  ({len(series.values)} samples of {lives} lives)"
            )
            if slope - 2 * error > limit:
                grown.append(name)
        return texts, grown


def held_by(pids: Sequence[int]) -> dict[str, float]:
    """Totals of the living processes: resident MiB, anonymous MiB, file descriptors, threads."""
    total = {"RSS MiB": 0.0, "own MiB": 0.0, "fds": 0.0, "threads": 0.0}
    for pid in pids:
        folder = Path(f"/proc/{pid}")
        try:
            status = dict(line.split(":", 1) for line in folder.joinpath("status").open())
            total["fds"] += len(os.listdir(folder / "fd"))
        except OSError:  # it has ended
            continue
        total["RSS MiB"] += int(status.get("VmRSS", "0 kB").split()[0]) / 1024
        total["threads"] += int(status["Threads"])
        total["own MiB"] += int(status.get("RssAnon", "0 kB").split()[0]) / 1024
    return total
