"""What a run shows: times of tokens turned into the field's usual figures.

TTFT is the time from arrival to the first token, ITL the gaps between the arrivals of tokens, TPOT
a request's (E2E - TTFT) / (tokens - 1), E2E the time to the last token: vLLM's definitions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayfin.actors.errors import InvalidConfig

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(slots=True)
class Timeline:
    """One request's times, seconds on one clock."""

    sent: float
    prompt_tokens: int
    pieces: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens that came)
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.pieces)

    @property
    def ttft(self) -> float:
        return self.pieces[0][0] - self.sent

    @property
    def e2el(self) -> float:
        return self.pieces[-1][0] - self.sent

    @property
    def tpot(self) -> float | None:
        return (self.e2el - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Between one piece and the next; tokens that come together are one piece."""
        times = [when for when, _ in self.pieces]
        return [after - before for before, after in zip(times, times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one kind of time, seconds; None without a value."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            return cls(None, None, None, None)
        ordered = sorted(values)
        # nearest rank: a time that was measured, never one in between
        ranked = (ordered[math.ceil(q / 100 * len(ordered)) - 1] for q in PERCENTILES)
        return cls(sum(ordered) / len(ordered), *ranked)


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers; times in seconds. Failed requests count as failed and nothing else."""

    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    goodput: float | None = None  # requests per second within all limits
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds if self.seconds else 0.0

    @property
    def output_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output."""
        total = self.prompt_tokens + self.output_tokens
        return total / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """All figures by name; times in seconds."""
        spreads = {name: _spread_json(getattr(self, name)) for name in METRICS}
        return {
            "requests": self.requests,
            "failed": self.failed,
            "seconds": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second": self.output_per_second,
            "total_tokens_per_second": self.tokens_per_second,
            "goodput": self.goodput,
            "errors": self.errors,
            **spreads,
        }


def figures(timelines: Sequence[Timeline], limits: Mapping[str, float] | None = None) -> Figures:
    """The figures of a run, from the first arrival to the last token.

    ``limits`` are seconds by metric (ttft, tpot, e2el) that a request must keep to be good
    (DistServe's goodput).
    """
    good = [own for own in timelines if own.error is None and own.pieces]
    seconds = 0.0
    if good:
        seconds = max(own.pieces[-1][0] for own in good) - min(own.sent for own in timelines)
    errors: dict[str, int] = {}
    for own in timelines:
        if own.error is not None:
            errors[own.error] = errors.get(own.error, 0) + 1
    goodput = None
    if limits:
        within = sum(_keeps(own, limits) for own in good)
        goodput = within / seconds if seconds else 0.0
    return Figures(
        requests=len(good),
        failed=len(timelines) - len(good),
        seconds=seconds,
        prompt_tokens=sum(own.prompt_tokens for own in good),
        output_tokens=sum(own.tokens for own in good),
        ttft=Spread.of([own.ttft for own in good]),
        tpot=Spread.of([own.tpot for own in good if own.tpot is not None]),
        itl=Spread.of([gap for own in good for gap in own.gaps]),
        e2el=Spread.of([own.e2el for own in good]),
        goodput=goodput,
        errors=errors,
    )


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Reads "ttft:500" and the like, milliseconds as in vLLM, to seconds by metric.

    Raises:
        InvalidConfig: anything else.
    """
    limits = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            seconds = float(value) / 1000
        except ValueError:
            seconds = -1.0
        if name not in ("ttft", "tpot", "e2el") or seconds <= 0:
            raise InvalidConfig(
                f"goodput must be like ttft:500, tpot:50 or e2el:9000 (ms), got {text!r}",
                "goodput",
            )
        limits[name] = seconds
    return limits


def _keeps(own: Timeline, limits: Mapping[str, float]) -> bool:
    values = {"ttft": own.ttft, "tpot": own.tpot or 0.0, "e2el": own.e2el}
    return all(values[name] <= limit for name, limit in limits.items())


def _spread_json(spread: Spread) -> dict[str, float | None]:
    return {"mean": spread.mean, "p50": spread.p50, "p90": spread.p90, "p99": spread.p99}
