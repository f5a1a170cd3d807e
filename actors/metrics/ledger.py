"""Adds up the counters of many actors, so that no total decreases when an actor dies.

Every life of an actor is an *incarnation* that counts from zero. Its growth since the last report
is added to the totals, which outlive it. A ledger is plain data: the hub sends copies to the
ingresses, and the next hub starts from one of them.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from rayfin.actors.adapters.usage import AdapterStats
from rayfin.actors.histogram import Histogram
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.metrics.families import (
    CACHE_CONFIG,
    ENGINE_ALIASES,
    ENGINE_ASKED,
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    ENGINE_HISTOGRAMS,
    ENGINE_RESTARTS,
    INGRESS_HEARD,
    LORA_INFO,
    Family,
    Value,
)

Series = tuple[str, tuple[str, ...]]
"""A family's name and its label values, without model_name and engine."""

Source = tuple[str, str]
"""Where a report comes from: engine and incarnation."""

INGRESSES = ""
"""Stands for all ingresses together, in place of an engine's label."""

OLDEST: Series = (INGRESS_HEARD.name, ())

MOST_KNOWN = 64
"""Incarnations whose last reports are kept; one that returns after so many others counts anew."""


@dataclass(slots=True)
class CounterReport:
    """Counters of one incarnation since its start, and its gauges now. Immutable by convention."""

    incarnation: str
    engine: str = INGRESSES
    gauges: dict[Series, float] = field(default_factory=dict)
    counters: dict[Series, float] = field(default_factory=dict)
    histograms: dict[Series, Histogram] = field(default_factory=dict)

    @property
    def source(self) -> Source:
        return self.engine, self.incarnation

    def is_before(self, other: "CounterReport") -> bool:
        """Whether this report is older than ``other`` of the same incarnation."""
        return any(self.counters.get(series, 0) < n for series, n in other.counters.items())


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
                totals.counters[ENGINE_RESTARTS.name, ()] = 0
        elif last is None and report.engine != INGRESSES:
            totals.counters[ENGINE_RESTARTS.name, ()] += 1
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
            histograms = {series: own.copy() for series, own in totals.histograms.items()}
            copied.totals[engine] = CounterTotals(dict(totals.counters), histograms)
        copied._last = self._last.copy()
        copied._current = dict(self._current) if now is None else dict.fromkeys(self._current, now)
        return copied

    def gauges(self, engine: str) -> dict[Series, float]:
        """Returns the sums over the current sources, and of times the earliest.

        An engine has one current incarnation.
        """
        found: dict[Series, float] = {}
        for source in self._current:
            if source[0] == engine:
                for series, value in self._last[source].gauges.items():
                    if series == OLDEST:
                        found[series] = min(value, found.get(series, value))
                    else:
                        found[series] = found.get(series, 0) + value
        return found

    def drop_gauges(self, engine: str) -> None:
        """Removes the gauges of an engine that has ended; its totals stay."""
        for source in [own for own in self._current if own[0] == engine]:
            del self._current[source]

    def drop_silent(self, engine: str, before: float) -> None:
        """Removes gauges of sources without a report since ``before``."""
        for source, heard in list(self._current.items()):
            if heard < before and source[0] == engine:
                del self._current[source]

    def _replace(self, engine: str) -> None:
        """Removes the reports of the engine's earlier schedulers, which never return."""
        self.drop_gauges(engine)
        for source in [own for own in self._last if own[0] == engine]:
            del self._last[source]

    @property
    def engines(self) -> list[str]:
        """The labels of all engines so far."""
        return [engine for engine in self.totals if engine != INGRESSES]


def engine_report(engine: str, stats: EngineStats, at: float) -> CounterReport:
    """Returns a scheduler's counters, zeros included, as of ``at`` in Unix time."""
    report = CounterReport(stats.incarnation, engine, {(ENGINE_ASKED.name, ()): at})
    for family in ENGINE_GAUGES:
        report.gauges.update(_read(family, stats))
    report.gauges[LORA_INFO.name, lora_labels(stats.adapters)] = at
    for family in (*ENGINE_COUNTERS, *ENGINE_ALIASES):
        report.counters.update(_read(family, stats))
    if stats.cache_config:
        report.gauges[CACHE_CONFIG.name, stats.cache_config] = 1
    for family in ENGINE_HISTOGRAMS:
        if family.name in stats.histograms:
            report.histograms[family.name, ()] = stats.histograms[family.name]
    return report


def lora_labels(adapters: AdapterStats) -> tuple[str, ...]:
    """The labels of vLLM's ``lora_requests_info``: the most adapters of a step, and names."""
    return str(adapters.max_loras), ",".join(adapters.running), ",".join(adapters.waiting)


def _read(family: Family, stats: EngineStats) -> dict[Series, float]:
    assert family.read is not None
    value: Value = family.read(stats)
    if isinstance(value, float | int):
        return {(family.name, ()): value}
    return {(family.name, (label,)): value.get(label, 0) for label in family.values}
