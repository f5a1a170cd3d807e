"""Adds up what many actors have counted, so that nothing goes backwards when one of them dies.

Every life of an actor is an *incarnation* that counts from zero. What an incarnation has grown by
since its last report is added to the totals, which outlive it. A ledger is plain data: a hub hands
copies of it to the ingresses, and the next hub starts from one.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from rayfin.actors.histogram import Histogram
from rayfin.actors.messages import EngineStats
from rayfin.actors.metrics.families import (
    CACHE_CONFIG,
    ENGINE_ASKED,
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    ENGINE_HISTOGRAMS,
    ENGINE_RESTARTS,
    INGRESS_HEARD,
    Family,
    Value,
)

Series = tuple[str, tuple[str, ...]]
"""A family's name and the values of its further labels."""

Source = tuple[str, str]
"""Whose a report is: engine and incarnation."""

INGRESSES = ""
"""In place of an engine's label: of all ingresses together."""

OLDEST: Series = (INGRESS_HEARD.name, ())

MOST_KNOWN = 64
"""Incarnations whose last reports are kept; one that comes back after so many counts anew."""


@dataclass(slots=True)
class CounterReport:
    """What one incarnation has counted since it began, and what it measures now. Never changed."""

    incarnation: str
    engine: str = INGRESSES
    gauges: dict[Series, float] = field(default_factory=dict)
    counters: dict[Series, float] = field(default_factory=dict)
    histograms: dict[Series, Histogram] = field(default_factory=dict)

    @property
    def source(self) -> Source:
        return self.engine, self.incarnation

    def is_before(self, other: "CounterReport") -> bool:
        """Whether this one of the same incarnation is older."""
        return any(self.counters.get(series, 0) < n for series, n in other.counters.items())


@dataclass(slots=True)
class CounterTotals:
    """Of one engine, over all its incarnations, or of all ingresses."""

    counters: dict[Series, float] = field(default_factory=dict)
    histograms: dict[Series, Histogram] = field(default_factory=dict)


class Ledger:
    """Totals and last reports."""

    def __init__(self) -> None:
        self.totals: dict[str, CounterTotals] = {}  # by engine
        self._last: OrderedDict[Source, CounterReport] = OrderedDict()
        self._current: dict[Source, float] = {}  # those whose gauges hold: heard of when

    def apply(self, report: CounterReport, now: float) -> None:
        """Adds what is new in the report, which came at ``now`` seconds of any clock."""
        last = self._last.get(report.source)
        if not report.incarnation or (last is not None and report.is_before(last)):
            return  # nobody's, or it was overtaken
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
        """One that can be changed; with ``now`` for another clock than this one's."""
        copied = Ledger()
        for engine, totals in self.totals.items():
            histograms = {series: own.copy() for series, own in totals.histograms.items()}
            copied.totals[engine] = CounterTotals(dict(totals.counters), histograms)
        copied._last = self._last.copy()
        copied._current = dict(self._current) if now is None else dict.fromkeys(self._current, now)
        return copied

    def gauges(self, engine: str) -> dict[Series, float]:
        """The sums over those who are current: an engine has one incarnation at a time.

        Of times, the first one.
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
        """The engine is not there any more; its totals stay."""
        for source in [own for own in self._current if own[0] == engine]:
            del self._current[source]

    def drop_silent(self, engine: str, before: float) -> None:
        """Gauges of those of whom nothing was heard since ``before``."""
        for source, heard in list(self._current.items()):
            if heard < before and source[0] == engine:
                del self._current[source]

    def _replace(self, engine: str) -> None:
        """The engine's scheduler is another one now, and the one before is not coming back."""
        self.drop_gauges(engine)
        for source in [own for own in self._last if own[0] == engine]:
            del self._last[source]

    @property
    def engines(self) -> list[str]:
        """The labels of all engines that there were."""
        return [engine for engine in self.totals if engine != INGRESSES]


def engine_report(engine: str, stats: EngineStats, at: float) -> CounterReport:
    """What a scheduler's counters say, zeros included, that was asked at ``at``, Unix time."""
    report = CounterReport(stats.incarnation, engine, {(ENGINE_ASKED.name, ()): at})
    for family in ENGINE_GAUGES:
        report.gauges.update(_read(family, stats))
    for family in ENGINE_COUNTERS:
        report.counters.update(_read(family, stats))
    if stats.pages_total:
        config = str(stats.page_size), str(stats.pages_total)
        report.gauges[CACHE_CONFIG.name, config] = 1
    for family in ENGINE_HISTOGRAMS:
        if family.name in stats.histograms:
            report.histograms[family.name, ()] = stats.histograms[family.name]
    return report


def _read(family: Family, stats: EngineStats) -> dict[Series, float]:
    assert family.read is not None
    told: Value = family.read(stats)
    if isinstance(told, float | int):
        return {(family.name, ()): told}
    return {(family.name, (value,)): told.get(value, 0) for value in family.values}
