"""Counters of one ingress: latencies as clients see them, HTTP answers, choices."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from rayfin.actors.histogram import Histogram, one_two_five
from rayfin.actors.metrics.families import (
    CHOICES_BOUNDS,
    HANDLERS,
    INGRESS_HEARD,
    ITL_BOUNDS,
    LATENCY_BOUNDS,
    REPLAY_REASONS,
    STATUSES,
    TTFT_BOUNDS,
)
from rayfin.actors.metrics.ledger import CounterReport, Series

LONGEST = 10**6  # tokens; an output may be longer than the last bucket


@dataclass(slots=True)
class _Group:
    """The choices of one prompt."""

    open: int = 0
    begun: int = 0
    longest: int = 0  # tokens


class IngressCounters:
    """Counters of one ingress since its start; used in its event loop only.

    ``in_flight`` returns the number of HTTP requests that generate tokens now.
    """

    def __init__(self, in_flight: Callable[[], int] = lambda: 0) -> None:
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(ITL_BOUNDS)
        self.e2e = Histogram(LATENCY_BOUNDS)
        self.ingress_time = Histogram(LATENCY_BOUNDS)
        self.first_flush = Histogram(TTFT_BOUNDS)
        self.transit = Histogram(ITL_BOUNDS)
        self.disconnects = 0
        self._in_flight = in_flight
        self.replays = dict.fromkeys(REPLAY_REASONS, 0)
        self.answers = {(handler, status): 0 for handler in HANDLERS for status in STATUSES}
        self._choices = Histogram(CHOICES_BOUNDS)
        self._longest = Histogram(one_two_five(LONGEST))
        self._groups: dict[int, _Group] = {}  # by the first choice's key
        self._incarnation = uuid.uuid4().hex

    def begun(self, group: int) -> None:
        """Counts one more choice of the prompt whose first choice has the key ``group``."""
        own = self._groups.setdefault(group, _Group())
        own.open += 1
        own.begun += 1

    def over(self, group: int, tokens: int) -> None:
        """Counts a choice that ended with ``tokens`` tokens; the last one completes the prompt."""
        own = self._groups[group]
        own.open -= 1
        own.longest = max(own.longest, tokens)
        if not own.open:
            del self._groups[group]
            self._choices.observe(own.begun)
            self._longest.observe(own.longest)

    def answered(self, path: str, status: int | None) -> None:
        """Counts an HTTP request that has ended; ``status`` is None if its client left before."""
        handler = path if path in HANDLERS else "other"
        answer = "none" if status is None else f"{status // 100}xx"
        self.answers[handler, answer if answer in STATUSES else "none"] += 1

    def latency(self) -> dict[str, tuple[float, int]]:
        """Returns sums in seconds and counts, for a page that shows their growth."""
        return {"ttft": (self.ttft.sum, self.ttft.count), "itl": (self.itl.sum, self.itl.count)}

    def report(self) -> CounterReport:
        """Returns all counters, zeros included."""
        counters: dict[Series, float] = {("client_disconnects", ()): self.disconnects}
        counters.update({("request_replays", (why,)): n for why, n in self.replays.items()})
        counters.update({("http_requests", labels): n for labels, n in self.answers.items()})
        gauges: dict[Series, float] = {
            ("http_requests_in_flight", ()): self._in_flight(),
            ("ingress_replicas", ()): 1,
            (INGRESS_HEARD.name, ()): time.time(),
        }
        histograms = {
            "time_to_first_token_seconds": self.ttft,
            "inter_token_latency_seconds": self.itl,
            "e2e_request_latency_seconds": self.e2e,
            "ingress_time_seconds": self.ingress_time,
            "first_flush_seconds": self.first_flush,
            "request_transport_seconds": self.transit,
            "request_params_n": self._choices,
            "request_max_num_generation_tokens": self._longest,
        }
        return CounterReport(
            self._incarnation,
            gauges=gauges,
            counters=counters,
            histograms={(name, ()): own.copy() for name, own in histograms.items()},
        )
