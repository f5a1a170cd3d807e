"""Adds up the counters of many actors, so that no total decreases when an actor dies.

Every life of an actor is an *incarnation* that counts from zero. Its growth since the last report
is added to the totals, which outlive it. A ledger is plain data: the hub sends copies to the
ingresses, and the next hub starts from one of them.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayfin.actors.metric import Family, Histogram, Word, declared

Series = tuple[str, tuple[str, ...]]
"""A metric's name and its label values, without model_name and engine."""

Value = float | Mapping[Any, float] | Histogram
"""A number, numbers by ``Word``, or a histogram."""

Source = tuple[str, str]
"""Where a report comes from: engine and incarnation."""

INGRESSES = ""
"""Stands for all ingresses together, in place of an engine's label."""

RESTARTS = Family(
    name="engine_restarts",
    kind="counter",
    help="Times that an engine's scheduler was replaced, or the engine.",
)

MOST_KNOWN = 64
"""Incarnations whose last reports are kept; one that returns after so many others counts anew."""


@dataclass(slots=True)
class CounterReport:
    """Counters of one incarnation since its start, and its gauges now. Immutable by convention."""

    incarnation: str
    engine: str = INGRESSES
    gauges: dict[Series, float] = field(default_factory=dict)
    earliest: dict[Series, float] = field(default_factory=dict)  # gauges that do not add up
    counters: dict[Series, float] = field(default_factory=dict)
    histograms: dict[Series, Histogram] = field(default_factory=dict)

    @property
    def source(self) -> Source:
        return self.engine, self.incarnation

    def is_before(self, other: "CounterReport") -> bool:
        """Whether this report is older than ``other`` of the same incarnation."""
        return any(self.counters.get(series, 0) < n for series, n in other.counters.items())

    def put(self, metric: Family, value: Value) -> None:
        """Adds the series of a metric, zeros included; words that it does not name are dropped."""
        if isinstance(value, Histogram):
            self.histograms[metric.name, ()] = value
            return
        gauges = self.earliest if metric.earliest else self.gauges
        series = gauges if metric.kind == "gauge" else self.counters
        if isinstance(value, Mapping):
            word: Word
            for word in metric.words or value:
                labels = (word,) if isinstance(word, str) else word
                series[metric.name, labels] = value.get(word, 0)
        else:
            series[metric.name, ()] = value

    def read(self, counts: object) -> None:
        """Adds what a dataclass declares."""
        kind: Any = type(counts)
        for name, metric in declared(kind):
            self.put(metric, getattr(counts, name))


@dataclass(slots=True)
class CounterTotals:
    """Totals of one engine over all its incarnations, or of all ingresses."""

    counters: dict[Series, float] = field(default_factory=dict)
    histograms: dict[Series, Histogram] = field(default_factory=dict)


class Ledger:
    """Totals and last reports."""

    def __init__(self) -> None:
        self.totals: dict[str, CounterTotals] = {}  # by engine
        self._last: OrderedDict[Source, CounterReport] = OrderedDict()
        self._current: dict[Source, float] = {}  # with valid gauges -> time of the last report

    def apply(self, report: CounterReport, now: float) -> None:
        """Adds the growth since the source's last report; ``now`` is in seconds of any clock."""
        last = self._last.get(report.source)
        if not report.incarnation or (last is not None and report.is_before(last)):
            return  # no incarnation, or a later report came first
        totals = self.totals.get(report.engine)
        if totals is None:
            totals = self.totals[report.engine] = CounterTotals()
            if report.engine != INGRESSES:
                totals.counters[RESTARTS.name, ()] = 0
        elif last is None and report.engine != INGRESSES:
            totals.counters[RESTARTS.name, ()] += 1
            self._replace(report.engine)
        for series, value in report.counters.items():
            grown = value - (last.counters.get(series, 0) if last else 0)
            totals.counters[series] = totals.counters.get(series, 0) + grown
        for series, histogram in report.histograms.items():
            news = histogram.grown_since(last.histograms.get(series) if last else None)
            known = totals.histograms.get(series)
            if known is None or known.bounds != news.bounds:
                totals.histograms[series] = news.copy()
            else:
                known.add(news)
        self._last[report.source] = report
        self._last.move_to_end(report.source)
        self._current[report.source] = now
        while len(self._last) > MOST_KNOWN:
            self._current.pop(self._last.popitem(last=False)[0], None)

    def copy(self, now: float | None = None) -> "Ledger":
        """Returns a mutable copy. With ``now``, for another clock: the time of all its reports."""
        copied = Ledger()
        for engine, totals in self.totals.items():
            histograms = {
                series: histogram.copy() for series, histogram in totals.histograms.items()
            }
            copied.totals[engine] = CounterTotals(dict(totals.counters), histograms)
        copied._last = self._last.copy()
        copied._current = dict(self._current) if now is None else dict.fromkeys(self._current, now)
        return copied

    def gauges(self, engine: str) -> dict[Series, float]:
        """Returns the sums over the current sources, and of times the earliest.

        An engine has one current incarnation.
        """
        sums: dict[Series, float] = {}
        for source in self._current:
            if source[0] == engine:
                report = self._last[source]
                for series, value in report.gauges.items():
                    sums[series] = sums.get(series, 0) + value
                for series, value in report.earliest.items():
                    sums[series] = min(value, sums.get(series, value))
        return sums

    def drop_gauges(self, engine: str) -> None:
        """Removes the gauges of an engine that has ended; its totals stay."""
        for source in [source for source in self._current if source[0] == engine]:
            del self._current[source]

    def drop_silent(self, engine: str, before: float) -> None:
        """Removes gauges of sources without a report since ``before``."""
        for source, heard in list(self._current.items()):
            if heard < before and source[0] == engine:
                del self._current[source]

    def _replace(self, engine: str) -> None:
        """Removes the reports of the engine's earlier schedulers, which never return."""
        self.drop_gauges(engine)
        for source in [source for source in self._last if source[0] == engine]:
            del self._last[source]

    @property
    def engines(self) -> list[str]:
        """The labels of all engines so far."""
        return [engine for engine in self.totals if engine != INGRESSES]
