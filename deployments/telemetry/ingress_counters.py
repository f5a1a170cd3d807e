"""Counters of one ingress: latencies as clients see them, HTTP answers, choices."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from rayfin.actors.histogram import Histogram, one_two_five
from rayfin.actors.metrics.families import (
    BATCH_LINES,
    CHOICES_BOUNDS,
    GUIDED_KINDS,
    HANDLERS,
    INGRESS_HEARD,
    ITL_BOUNDS,
    LATENCY_BOUNDS,
    OPEN_STATUSES,
    REPLAY_REASONS,
    STATUSES,
    TOOL_CHOICES,
    TTFT_BOUNDS,
    VERDICTS,
)
from rayfin.actors.metrics.ledger import CounterReport, Series
from rayfin.deployments.telemetry.image_counters import ImageCounters

LONGEST = 10**6  # tokens; an output may be longer than the last bucket


@dataclass(slots=True)
class _Group:
    """The choices of one prompt."""

    open: int = 0
    begun: int = 0
    longest: int = 0  # tokens


class OutputCounters:
    """Counters of guided requests, tool calls and thoughts of one ingress.

    ``guided(kind)``, ``verdict(verdict)``, ``warden_restarted()``, ``tool_called(choice, calls)``,
    ``tool_call_unparsed()``, ``tool_call_cut()``, ``reasoned(tokens)``, ``thinking_budget_spent()``
    and ``reads(tools, reasoning)`` are called where these happen. Raises KeyError for a word that
    is not of its label's set.
    """

    def __init__(self) -> None:
        self.images = ImageCounters()
        self._format = ("none", "none")
        self._counters: dict[Series, float] = {
            **{("guided_requests", (kind,)): 0 for kind in GUIDED_KINDS},
            **{("grammar_verdicts", (verdict,)): 0 for verdict in VERDICTS},
            ("warden_restarts", ()): 0,
            **{("tool_calls", (choice,)): 0 for choice in TOOL_CHOICES},
            ("tool_calls_unparsed", ()): 0,
            ("tool_calls_cut", ()): 0,
            ("reasoning_tokens", ()): 0,
            ("thinking_budgets_spent", ()): 0,
        }

    def guided(self, kind: str) -> None:
        """Counts a request with a grammar; ``kind`` is one of GUIDED_KINDS."""
        self._counters["guided_requests", (kind,)] += 1

    def verdict(self, verdict: str) -> None:
        """Counts a grammar that was checked; ``verdict`` is one of VERDICTS."""
        self._counters["grammar_verdicts", (verdict,)] += 1

    def warden_restarted(self) -> None:
        """Counts a replacement of the process that checks grammars."""
        self._counters["warden_restarts", ()] += 1

    def tool_called(self, choice: str, calls: int = 1) -> None:
        """Counts whole calls of an answer; ``choice`` is one of TOOL_CHOICES."""
        self._counters["tool_calls", (choice,)] += calls

    def tool_call_unparsed(self) -> None:
        """Counts a call that did not parse, and was given as text."""
        self._counters["tool_calls_unparsed", ()] += 1

    def tool_call_cut(self) -> None:
        """Counts a call that the end of its answer cut off."""
        self._counters["tool_calls_cut", ()] += 1

    def reasoned(self, tokens: int) -> None:
        """Counts the tokens of an answer's thoughts."""
        self._counters["reasoning_tokens", ()] += tokens

    def thinking_budget_spent(self) -> None:
        """Counts a thought that its budget ended."""
        self._counters["thinking_budgets_spent", ()] += 1

    def reads(self, tools: str | None, reasoning: str | None) -> None:
        """Names the formats of calls and of thoughts in the model's answers, or None."""
        self._format = (tools or "none", reasoning or "none")

    def counters(self) -> dict[Series, float]:
        """Returns all counters, zeros included."""
        return dict(self._counters)

    def gauges(self) -> dict[Series, float]:
        """Returns the formats, as labels of a one."""
        return {("output_format", self._format): 1}


class IngressCounters:
    """Counters of one ingress since its start; used in its event loop only.

    ``in_flight`` returns the number of HTTP requests that generate tokens now. ``output`` counts
    guided requests, tool calls and thoughts: ``counts.output.guided("json")``.
    """

    def __init__(self, in_flight: Callable[[], int] = lambda: 0) -> None:
        self.output = OutputCounters()
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
        path = path.removesuffix("/")
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
        counters.update(self.output.counters())
        counters.update(self.output.images.counters())
        counters.update({("batch_lines", (result,)): 0 for result in BATCH_LINES})
        gauges: dict[Series, float] = {
            ("http_requests_in_flight", ()): self._in_flight(),
            ("ingress_replicas", ()): 1,
            (INGRESS_HEARD.name, ()): time.time(),
            **self.output.gauges(),
            **{("batches_open", (status,)): 0 for status in OPEN_STATUSES},  # the worker's
            ("batch_lines_waiting", ()): 0,
            ("batch_seconds_behind", ()): 0,
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
            **self.output.images.histograms(),
        }
        return CounterReport(
            self._incarnation,
            gauges=gauges,
            counters=counters,
            histograms={(name, ()): own.copy() for name, own in histograms.items()},
        )
