"""A ledger as Prometheus text, under Rayfin's names and, if asked, under vLLM's as well."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import core as prometheus
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rayfin.actors.metric import Bounds, Family, Histogram
from rayfin.actors.metrics.ledger import INGRESSES, Ledger

PREFIX = "rayfin_"
ALIAS_PREFIX = "vllm:"
EVERY_ENGINE = "all"
"""Under the alias every series has the label ``engine``; this is its value for other metrics."""

FAMILIES: dict[str, Any] = {
    "gauge": prometheus.GaugeMetricFamily,
    "counter": prometheus.CounterMetricFamily,
    "histogram": prometheus.HistogramMetricFamily,
}
Samples = list[tuple[str, tuple[str, ...], float | Histogram]]
"""The series of a metric: engine, values of its labels, value."""


def render(model_name: str, alias: str | None, ledger: Ledger, metrics: Sequence[Family]) -> bytes:
    """Returns the Prometheus text of what ``metrics`` declare of a ledger.

    Args:
        alias: "vllm" adds vLLM's names; None does not.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_LedgerCollector(model_name, alias, ledger, metrics))
    return generate_latest(registry)


class _LedgerCollector(Collector):
    def __init__(
        self, model_name: str, alias: str | None, ledger: Ledger, metrics: Sequence[Family]
    ) -> None:
        self._model_name = model_name
        self._alias = alias
        self._ledger = ledger
        self._metrics = metrics

    def collect(self) -> Iterator[prometheus.Metric]:
        samples: defaultdict[str, Samples] = defaultdict(list)
        for engine, totals in self._ledger.totals.items():
            for kind in (self._ledger.gauges(engine), totals.counters, totals.histograms):
                for (name, words), value in kind.items():
                    samples[name].append((engine, words, value))
        for metric in self._metrics:
            if not metric.alias_only:
                yield self._family(metric, samples[metric.name], alias=False)
            if metric.alias and self._alias == "vllm":
                yield self._family(metric, samples[metric.name], alias=True)

    def _family(self, metric: Family, samples: Samples, *, alias: bool) -> prometheus.Metric:
        of_engines = alias or any(engine != INGRESSES for engine, _, _ in samples)
        labels = alias and metric.alias_labels or metric.labels
        constants = dict(metric.alias_constants) if alias else {}
        family = FAMILIES[metric.kind](
            (ALIAS_PREFIX if alias else PREFIX) + metric.name,
            metric.help,
            labels=["model_name", *(["engine"] if of_engines else []), *labels, *constants],
        )
        for engine, words, value in samples:
            engines = [engine or EVERY_ENGINE] if of_engines else []
            shown = [self._model_name, *engines, *words, *constants.values()]
            if isinstance(value, Histogram):
                bounds = alias and metric.alias_bounds or None
                family.add_metric(shown, _buckets(value, bounds), value.sum)
            else:
                family.add_metric(shown, value)
        finished: prometheus.Metric = family
        return finished


def _buckets(histogram: Histogram, bounds: Bounds | None) -> list[tuple[str, int]]:
    text: Any = floatToGoString
    return [(text(end), count) for end, count in histogram.cumulative(bounds)]


# Prometheus texts of several models as one: each family appears once, with all its series.

FIRST_LINE = b"# HELP "


def merged(texts: Sequence[bytes]) -> bytes:
    """Merges ``texts`` of ``prometheus_client``, whose series all differ.

    A family has a line of help, one of its type, and its series; its name may stand only once in a
    text.
    """
    if len(texts) == 1:
        return texts[0]
    heads: dict[bytes, list[bytes]] = {}
    series: dict[bytes, list[bytes]] = {}
    for text in texts:
        name = b""
        for line in text.splitlines(keepends=True):
            if line.startswith(FIRST_LINE):
                name = line.split(b" ", 3)[2]
                heads[name] = []
            kind = heads if line.startswith(b"#") else series
            kind.setdefault(name, []).append(line)
    return b"".join(b"".join(lines + series.get(name, [])) for name, lines in heads.items())
