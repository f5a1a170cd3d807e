"""A ledger as Prometheus text, under Rayfin's names and, if asked, under vLLM's as well."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rayfin.actors.hub.ledger import INGRESSES, Ledger, Series
from rayfin.actors.metrics import ALIAS_PREFIX, EVERY_ENGINE, FAMILIES, PREFIX, Family


class LedgerCollector(Collector):
    """Renders what ``read`` returns, at each scrape anew.

    Args:
        alias: "vllm", or None for our own names only.
    """

    def __init__(self, model_name: str, alias: str | None, read: Callable[[], Ledger]) -> None:
        self._model_name = model_name
        self._alias = alias
        self._read = read

    def collect(self) -> Iterator[Metric]:
        ledger = self._read()
        gauges = {engine: ledger.gauges(engine) for engine in ledger.totals}
        counters = {engine: own.counters for engine, own in ledger.totals.items()}
        for family, alias in tellings(FAMILIES, self._alias):
            shape = _Shape(self._model_name, family, alias)
            if family.kind == "histogram":
                yield shape.histogram(ledger)
            elif family.kind == "counter":
                yield shape.fill(CounterMetricFamily, counters)
            else:
                yield shape.fill(GaugeMetricFamily, gauges)


def tellings(families: Sequence[Family], alias: str | None) -> Iterator[tuple[Family, bool]]:
    """Each family, and after it once more those that are told under the alias as well."""
    for family in families:
        yield family, False
        if alias == "vllm" and family.alias:
            yield family, True


def is_ours(family: Family, engine: str, name: str) -> bool:
    """Whether an engine's series of that name are the family's."""
    return name == family.name and (engine != INGRESSES) == family.engine


class _Shape:
    """How one family is told: its name, labels and buckets."""

    def __init__(self, model_name: str, family: Family, alias: bool) -> None:
        self._family = family
        self._model_name = model_name
        self._with_engine = family.engine or alias
        self._bounds = (family.alias_bounds or None) if alias else None
        further = (family.alias_labels or family.labels) if alias else family.labels
        self.labels = ["model_name", *(["engine"] if self._with_engine else []), *further]
        self.head = (ALIAS_PREFIX if alias else PREFIX) + family.name, family.help

    def fill(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        found: Mapping[str, Mapping[Series, float]],
    ) -> Metric:
        """The family's values among all ``found``, which are by engine."""
        metric = kind(*self.head, labels=self.labels)
        for engine, own in found.items():
            for (name, values), value in own.items():
                if is_ours(self._family, engine, name):
                    metric.add_metric(self._labels(engine, values), value)
        return metric

    def histogram(self, ledger: Ledger) -> Metric:
        metric = HistogramMetricFamily(*self.head, labels=self.labels)
        for engine, totals in ledger.totals.items():
            for (name, values), own in totals.histograms.items():
                if is_ours(self._family, engine, name):
                    buckets = [(_bound(end), n) for end, n in own.cumulative(self._bounds)]
                    metric.add_metric(self._labels(engine, values), buckets, own.sum)
        return metric

    def _labels(self, engine: str, values: tuple[str, ...]) -> list[str]:
        shown = [engine or EVERY_ENGINE] if self._with_engine else []
        return [self._model_name, *shown, *values]


def _bound(end: float) -> str:
    return str(floatToGoString(end))  # type: ignore[no-untyped-call]


def render(model_name: str, alias: str | None, ledger: Ledger) -> bytes:
    """The Prometheus text of a ledger."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerCollector(model_name, alias, lambda: ledger))
    return generate_latest(registry)
