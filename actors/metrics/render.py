"""A ledger as Prometheus text, under Rayfin's names and, if asked, under vLLM's as well."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rayfin.actors.histogram import Bounds
from rayfin.actors.metrics.families import ALIAS_PREFIX, EVERY_ENGINE, FAMILIES, PREFIX, Family
from rayfin.actors.metrics.ledger import INGRESSES, Ledger, Series


class LedgerCollector(Collector):
    """Renders what ``read`` returns at each scrape.

    Args:
        alias: "vllm" adds vLLM's names; None does not.
    """

    def __init__(self, model_name: str, alias: str | None, read: Callable[[], Ledger]) -> None:
        self._model_name = model_name
        self._alias = alias
        self._read = read

    def collect(self) -> Iterator[Metric]:
        ledger = self._read()
        gauges = {engine: ledger.gauges(engine) for engine in ledger.totals}
        counters = {engine: own.counters for engine, own in ledger.totals.items()}
        for family, alias in with_aliases(FAMILIES, self._alias):
            shape = _Shape(self._model_name, family, alias)
            if family.kind == "histogram":
                yield shape.histogram(ledger)
            elif family.kind == "counter":
                yield shape.fill(CounterMetricFamily, counters)
            else:
                yield shape.fill(GaugeMetricFamily, gauges)


def with_aliases(families: Sequence[Family], alias: str | None) -> Iterator[tuple[Family, bool]]:
    """Yields each family, followed by itself under the alias if it has one."""
    for family in families:
        if not family.alias_only:
            yield family, False
        if alias == "vllm" and family.alias:
            yield family, True


def is_ours(family: Family, engine: str, name: str) -> bool:
    """Whether series ``name`` of ``engine`` belongs to the family."""
    return name == family.name and (engine != INGRESSES) == family.engine


class _Shape:
    """Name, labels and buckets of one family, as rendered."""

    def __init__(self, model_name: str, family: Family, alias: bool) -> None:
        self._family = family
        self._model_name = model_name
        self._with_engine = family.engine or alias
        self._bounds = (family.alias_bounds or None) if alias else None
        further = (family.alias_labels or family.labels) if alias else family.labels
        constants = family.alias_constants if alias else {}
        self._constants = list(constants.values())
        engine = ["engine"] if self._with_engine else []
        self.labels = ["model_name", *engine, *further, *constants]
        self.head = (ALIAS_PREFIX if alias else PREFIX) + family.name, family.help

    def fill(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        found: Mapping[str, Mapping[Series, float]],
    ) -> Metric:
        """Collects the family's values from ``found``, which is by engine."""
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
        return [self._model_name, *shown, *values, *self._constants]


def _bound(end: float) -> str:
    return str(floatToGoString(end))  # type: ignore[no-untyped-call]


def render(model_name: str, alias: str | None, ledger: Ledger) -> bytes:
    """The Prometheus text of a ledger."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerCollector(model_name, alias, lambda: ledger))
    return generate_latest(registry)


# The same text, faster: the constant part of each line is rendered once.

Gauges = dict[str, dict[Series, float]]
"""By engine."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where to find the value of a line, or the values of a histogram's lines."""

    kind: str
    engine: str
    series: Series
    bounds: Bounds | None = None  # None: all

    def values(self, ledger: Ledger, gauges: Gauges) -> list[float]:
        totals = ledger.totals[self.engine]
        if self.kind == "gauge":
            return [gauges[self.engine][self.series]]
        if self.kind == "counter":
            return [totals.counters[self.series]]
        own = totals.histograms[self.series]
        counts = [count for _, count in own.cumulative(self.bounds)]
        return [*counts, counts[-1], own.sum]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The constant parts of the text of ledgers with the same series."""

    shape: object
    places: list[_Place]
    heads: list[str]  # the text before each value
    tail: str


class Writer:
    """``render`` for one model, in a tenth of its time or less."""

    def __init__(self, model_name: str, alias: str | None) -> None:
        self._model_name = model_name
        self._alias = alias
        self._layout = _Layout(None, [], [], "")

    def write(self, ledger: Ledger) -> bytes:
        """The Prometheus text of a ledger."""
        gauges = {engine: ledger.gauges(engine) for engine in ledger.totals}
        layout, shape = self._layout, _shape(ledger, gauges)
        if shape != layout.shape:
            layout = self._layout = self._lay_out(ledger, gauges, shape)
        values = (v for place in layout.places for v in place.values(ledger, gauges))
        lines = (head + _number(v) for head, v in zip(layout.heads, values, strict=True))
        return ("".join(lines) + layout.tail).encode()

    def _lay_out(self, ledger: Ledger, gauges: Gauges, shape: object) -> _Layout:
        """Splits the text that the library renders."""
        heads, head = [], ""
        for line in render(self._model_name, self._alias, ledger).decode().splitlines(True):
            if line.startswith("#"):
                head += line
            else:
                series, _, _ = line.rpartition(" ")
                heads.append(head + series + " ")
                head = "\n"
        return _Layout(shape, list(self._places(ledger, gauges)), heads, head)

    def _places(self, ledger: Ledger, gauges: Gauges) -> Iterator[_Place]:
        for family, alias in with_aliases(FAMILIES, self._alias):
            bounds = (family.alias_bounds or None) if alias else None
            for engine, totals in ledger.totals.items():
                found: dict[str, Iterable[Series]] = {
                    "gauge": gauges[engine],
                    "counter": totals.counters,
                    "histogram": totals.histograms,
                }
                for series in found[family.kind]:
                    if is_ours(family, engine, series[0]):
                        yield _Place(family.kind, engine, series, bounds)


def _shape(ledger: Ledger, gauges: Gauges) -> object:
    """Equal for two ledgers whose texts differ in values only."""
    return [
        (
            engine,
            list(gauges[engine]),
            list(totals.counters),
            [(series, own.bounds) for series, own in totals.histograms.items()],
        )
        for engine, totals in ledger.totals.items()
    ]


@lru_cache(maxsize=4096)
def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


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
