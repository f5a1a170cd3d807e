"""Every metric name of Rayfin, once, and how the plain counters of actors become Prometheus text.

Actors count in plain fields (``EngineStats``); nothing here is on a step's path. Label sets are
closed: model name and engine are the operator's, finish reasons are Rayfin's own words.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rayfin.actors.messages import EngineStats

PREFIX = "rayfin_"
FINISH_REASONS = ("stop", "length", "abort", "error")
REPLAY_REASONS = ("lost", "moved")
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    help: str
    value: Callable[[EngineStats], float]


GAUGES = (
    _Series("num_requests_running", "Requests that hold a slot.", lambda s: s.running),
    _Series("num_requests_waiting", "Requests in the queue.", lambda s: s.waiting),
    _Series(
        "kv_cache_usage_perc",
        "Share of the KV pages in use, 0-1.",
        lambda s: s.pages_held / max(s.pages_total, 1),
    ),
    _Series("kv_cache_pages", "KV pages there are.", lambda s: s.pages_total),
    _Series(
        "swap_usage_perc",
        "Share of the swap space in use, 0-1.",
        lambda s: s.host_pages_held / max(s.host_pages_total, 1),
    ),
    _Series("engine_epoch", "Times the runners were replaced.", lambda s: s.epoch),
)
COUNTERS = (
    _Series("engine_steps", "Steps done.", lambda s: s.steps),
    _Series("num_preemptions", "Requests put back for want of pages.", lambda s: s.preemptions),
    _Series(
        "num_preemptions_by_swap",
        "Of those, requests whose pages went to host memory.",
        lambda s: s.preemptions_by_swap,
    ),
    _Series("swapped_out_pages", "KV pages that went to host memory.", lambda s: s.swapped_out),
    _Series("swapped_in_pages", "KV pages that came back from it.", lambda s: s.swapped_in),
    _Series(
        "num_requests_requeued",
        "Requests put back because the runners were replaced.",
        lambda s: s.requeued_by_restart,
    ),
    _Series("prompt_tokens", "Prompt tokens taken in.", lambda s: s.prompt_tokens),
    _Series("generation_tokens", "Tokens sampled.", lambda s: s.generation_tokens),
)


class EngineCollector(Collector):
    """Renders the last snapshot of each engine."""

    def __init__(self, model_name: str) -> None:
        self.stats = {"0": EngineStats()}  # by engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        names = ["model_name", "engine"]
        for series in GAUGES:
            gauge = GaugeMetricFamily(PREFIX + series.name, series.help, labels=names)
            for engine, stats in self.stats.items():
                gauge.add_metric([self._model_name, engine], series.value(stats))
            yield gauge
        for series in COUNTERS:
            counter = CounterMetricFamily(PREFIX + series.name, series.help, labels=names)
            for engine, stats in self.stats.items():
                counter.add_metric([self._model_name, engine], series.value(stats))
            yield counter
        finished = CounterMetricFamily(
            PREFIX + "request_success",
            "Requests that ended, by how.",
            labels=[*names, "finished_reason"],
        )
        for engine, stats in self.stats.items():
            for reason in FINISH_REASONS:
                labels = [self._model_name, engine, reason]
                finished.add_metric(labels, stats.finished.get(reason, 0))
        yield finished


class IngressMetrics:
    """What an ingress sees of requests: when tokens reach the edge."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self.engine = EngineCollector(model_name)
        self._registry.register(self.engine)
        labels = ["model_name"]
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token at the edge.",
            TIME_TO_FIRST_TOKEN_BUCKETS,
        ).labels(model_name)
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between a request's tokens.", INTER_TOKEN_BUCKETS
        ).labels(model_name)
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_BUCKETS
        ).labels(model_name)
        self.disconnects = Counter(
            PREFIX + "client_disconnects",
            "Requests given up by their client.",
            labels,
            registry=self._registry,
        ).labels(model_name)
        replays = Counter(
            PREFIX + "request_replays",
            "Times that a request was sent again, its engine lost or the request handed back.",
            [*labels, "reason"],
            registry=self._registry,
        )
        self.replays = {reason: replays.labels(model_name, reason) for reason in REPLAY_REASONS}

    def latency(self) -> dict[str, tuple[float, int]]:
        """Sums in seconds and counts, for a page that shows what they grow by."""
        return {
            "ttft": _sum_and_count(self.time_to_first_token),
            "itl": _sum_and_count(self.inter_token_latency),
        }

    def render(self, stats: Mapping[str, EngineStats]) -> bytes:
        """The Prometheus text; of engines without fresh ``stats`` the last known ones stand."""
        self.engine.stats |= stats
        return generate_latest(self._registry)

    def _histogram(self, name: str, help: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(
            PREFIX + name, help, ["model_name"], registry=self._registry, buckets=tuple(buckets)
        )


def _sum_and_count(histogram: Histogram) -> tuple[float, int]:
    samples = {own.name: own.value for metric in histogram.collect() for own in metric.samples}
    told = {name.rpartition("_")[2]: value for name, value in samples.items()}
    return told["sum"], int(told["count"])
