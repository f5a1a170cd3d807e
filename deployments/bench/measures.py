"""Latency and throughput figures from the times at which tokens arrive.

TTFT is the time from arrival to the first token, ITL the gaps between the arrivals of tokens, TPOT
a request's (E2E - TTFT) / (tokens - 1), E2E the time to the last token: vLLM's definitions.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench.endpoint import StreamPiece

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(slots=True)
class Timeline:
    """The times of one request, in seconds of one clock."""

    sent: float
    prompt_tokens: int = 0
    pieces: list[tuple[float, int]] = field(default_factory=list)  # (arrival, number of tokens)
    error: str | None = None
    cached_tokens: int | None = None  # of the prompt, where the server counts them
    ended: float | None = None  # when the stream ended; None: with its last piece
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = sum(count for _, count in self.pieces)

    def add(self, when: float, count: int) -> None:
        """Adds ``count`` tokens that arrived at once."""
        self.pieces.append((when, count))
        self.tokens += count

    def record(self, piece: StreamPiece) -> None:
        """Adds the tokens of a stream's event that arrives now.

        A piece of text is one token where the server does not count as it goes; the last event's
        count then corrects the last piece.
        """
        if piece.cached_tokens is not None:
            self.cached_tokens = piece.cached_tokens
        counted = piece.completion_tokens
        new = bool(piece.text) if counted is None else counted - self.tokens
        if new > 0 and piece.usage_only and self.pieces:
            when, count = self.pieces.pop()
            self.tokens -= count
            self.add(when, count + new)
        elif new > 0:
            self.add(time.perf_counter(), int(new))

    def expect(self, tokens: int) -> None:
        """Records an error unless there is one or all ``tokens`` arrived."""
        if self.error is None and self.tokens != tokens:
            self.error = f"received {self.tokens} of {tokens} tokens"

    @property
    def ttft(self) -> float | None:
        return self.pieces[0][0] - self.sent if self.pieces else None

    @property
    def e2el(self) -> float | None:
        if self.ended is not None:
            return self.ended - self.sent
        return self.pieces[-1][0] - self.sent if self.pieces else None

    @property
    def tpot(self) -> float | None:
        if self.tokens < 2:
            return None
        return (self.pieces[-1][0] - self.pieces[0][0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive pieces; tokens that arrive together are one piece."""
        times = [when for when, _ in self.pieces]
        return [after - before for before, after in zip(times, times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of times in seconds; all None without values."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread":
        """The spread of the values that are not None."""
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return cls(None, None, None, None)
        # nearest rank: always a measured time, never an interpolated one
        ranked = (ordered[math.ceil(q / 100 * len(ordered)) - 1] for q in PERCENTILES)
        return cls(sum(ordered) / len(ordered), *ranked)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run, times in seconds. Failed requests count in ``failed`` alone."""

    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    cached_tokens: int | None = None  # of the prompts; None: no server has counted them
    limits: dict[str, float] = field(default_factory=dict)  # seconds by metric
    goodput: float | None = None  # requests per second within all limits
    attainment: float | None = None  # share of all requests, failed ones too, within all limits
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
        spreads = {name: asdict(getattr(self, name)) for name in METRICS}
        return {
            "requests": self.requests,
            "failed": self.failed,
            "seconds": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second": self.output_per_second,
            "total_tokens_per_second": self.tokens_per_second,
            "cached_prompt_tokens": self.cached_tokens,
            "limits": self.limits,
            "goodput": self.goodput,
            "attainment": self.attainment,
            "errors": self.errors,
            **spreads,
        }


def figures(
    timelines: Sequence[Timeline],
    limits: Mapping[str, float] | None = None,
    seconds: float | None = None,
) -> Figures:
    """Computes the figures of a run, over ``seconds`` or from the first arrival to the last token.

    ``limits`` are seconds by metric (ttft, tpot, e2el). Goodput (DistServe) counts the requests
    within all of them.
    """
    good = [timeline for timeline in timelines if timeline.error is None]
    if seconds is None:
        last = max((line.pieces[-1][0] for line in good if line.pieces), default=None)
        seconds = 0.0 if last is None else last - min(line.sent for line in timelines)
    goodput = attainment = None
    if limits:
        within = sum(_within(timeline, limits) for timeline in good)
        goodput = within / seconds if seconds else 0.0
        attainment = within / max(1, len(timelines))
    cached = [line.cached_tokens for line in good if line.cached_tokens is not None]
    return Figures(
        requests=len(good),
        failed=len(timelines) - len(good),
        seconds=seconds,
        prompt_tokens=sum(line.prompt_tokens for line in good),
        output_tokens=sum(line.tokens for line in good),
        ttft=Spread.of(line.ttft for line in good),
        tpot=Spread.of(line.tpot for line in good),
        itl=Spread.of(gap for line in good for gap in line.gaps),
        e2el=Spread.of(line.e2el for line in good),
        cached_tokens=sum(cached) if cached else None,
        limits=dict(limits or {}),
        goodput=goodput,
        attainment=attainment,
        errors=dict(Counter(line.error for line in timelines if line.error is not None)),
    )


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Parses texts such as "ttft:500", milliseconds as in vLLM, to seconds by metric.

    Raises:
        InvalidConfig: a text is malformed.
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


def _within(timeline: Timeline, limits: Mapping[str, float]) -> bool:
    return all((getattr(timeline, name) or 0.0) <= limit for name, limit in limits.items())
