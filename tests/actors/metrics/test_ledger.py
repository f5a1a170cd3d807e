"""Totals over many lives: never backwards, and exactly what was counted."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rayfin.actors.adapters.part import ADAPTERS_INFO
from rayfin.actors.metric import Histogram
from rayfin.actors.metrics.engine_stats import (
    ASKED,
    ENGINE_METRICS,
    EngineStats,
    engine_report,
)
from rayfin.actors.metrics.ledger import INGRESSES, MOST_KNOWN, RESTARTS, CounterReport, Ledger
from rayfin.deployments.telemetry.ingress_counters import INGRESS_METRICS, IngressCounters

STEPS, WAIT = ("engine_steps", ()), ("wait", ())


def report(
    life: str, steps: float, engine: str = "0", waits: int = 0, running: int = 0
) -> CounterReport:
    histogram = Histogram((1.0,))
    histogram.observe(0.5, waits)
    return CounterReport(
        life, engine, {("running", ()): running}, {}, {STEPS: steps}, {WAIT: histogram}
    )


def test_reports_that_were_overtaken_or_are_nobodys_count_nothing() -> None:
    ledger = Ledger()
    for own in (report("a", 5, waits=5), report("a", 3, waits=3), report("", 0), report("a", 6)):
        ledger.apply(own, 0.0)
    assert ledger.totals["0"].counters == {STEPS: 6, (RESTARTS.name, ()): 0}


class Machine:
    """Some actors that count and die, a hub that hears of them, and copies of its ledger."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.lives = [0, 0, 0]  # of engines 0, 1, and of an ingress
        self.counted = [0, 0, 0]
        self.heard: Counter[str] = Counter()  # what has been reported, over all lives
        self.reported = [0, 0, 0]  # of the present lives

    def act(self, action: str, who: int) -> None:
        if action == "count":
            self.counted[who] += 1
        elif action == "die":
            self.lives[who] += 1
            self.counted[who] = self.reported[who] = 0
        elif action == "hub dies":
            self.ledger = self.ledger.copy(now=0.0)
        else:
            engine = (*"01", INGRESSES)[who]
            self.heard[engine] += self.counted[who] - self.reported[who]
            self.reported[who] = self.counted[who]
            count = self.counted[who]
            self.ledger.apply(report(f"{who}.{self.lives[who]}", count, engine, count), 0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["count", "report", "die", "hub dies"]), st.integers(0, 2)),
        max_size=60,
    )
)
def test_totals_are_what_was_reported(actions: list[tuple[str, int]]) -> None:
    machine = Machine()
    for action in actions:
        machine.act(*action)
        for engine, totals in machine.ledger.totals.items():
            assert totals.counters[STEPS] == machine.heard[engine]
            assert totals.histograms[WAIT].count == machine.heard[engine]


def test_another_life_of_an_engine_is_a_restart() -> None:
    ledger = Ledger()
    restarts = []
    for life in ("a", "a", "b", "b", "c"):
        ledger.apply(report(life, 1, running=3), 0.0)
        restarts.append(ledger.totals["0"].counters[RESTARTS.name, ()])
        assert ledger.gauges("0") == {("running", ()): 3}  # of the present life alone
    assert restarts == [0, 0, 1, 1, 2]
    ledger.apply(report("i", 1, INGRESSES), 0.0)
    ledger.apply(report("j", 1, INGRESSES), 0.0)
    assert (RESTARTS.name, ()) not in ledger.totals[INGRESSES].counters


def test_gauges_of_ingresses_add_up_while_they_are_heard_of() -> None:
    ledger = Ledger()
    ledger.apply(report("a", 5, INGRESSES, running=1), 10.0)
    ledger.apply(report("b", 6, INGRESSES, running=2), 15.0)
    assert ledger.gauges(INGRESSES) == {("running", ()): 3}
    ledger.drop_silent(INGRESSES, 12.0)
    assert ledger.gauges(INGRESSES) == {("running", ()): 2}
    assert ledger.totals[INGRESSES].counters[STEPS] == 11
    ledger.apply(report("a", 7, INGRESSES, running=1), 20.0)  # it had only been silent
    assert ledger.gauges(INGRESSES) == {("running", ()): 3}
    assert ledger.totals[INGRESSES].counters[STEPS] == 13


def test_an_engine_that_is_gone_has_totals_only() -> None:
    ledger = Ledger()
    ledger.apply(report("a", 5, running=1), 0.0)
    ledger.drop_gauges("0")
    assert ledger.gauges("0") == {} and ledger.totals["0"].counters[STEPS] == 5
    assert ledger.engines == ["0"]


def test_other_buckets_begin_anew() -> None:
    ledger = Ledger()
    ledger.apply(report("a", 1, waits=3), 0.0)
    later = report("b", 1)
    later.histograms[WAIT] = Histogram((1.0, 2.0))
    ledger.apply(later, 0.0)
    assert ledger.totals["0"].histograms[WAIT] == Histogram((1.0, 2.0))


def test_the_ledger_does_not_grow_with_lives() -> None:
    ledger = Ledger()
    for life in range(3 * MOST_KNOWN):
        ledger.apply(report(f"i{life}", 1, INGRESSES), 0.0)
        ledger.apply(report(f"e{life}", 1), 0.0)
    assert len(ledger._last) <= MOST_KNOWN and len(ledger._current) <= MOST_KNOWN
    assert ledger.totals["0"].counters[STEPS] == 3 * MOST_KNOWN


def test_ingresses_are_as_fresh_as_the_one_that_was_heard_of_least_lately() -> None:
    ledger, heard = Ledger(), ("reported", ())
    for life, at in (("a", 30.0), ("b", 20.0), ("c", 40.0)):
        ledger.apply(CounterReport(life, INGRESSES, {("running", ()): 1}, {heard: at}), 0.0)
    assert ledger.gauges(INGRESSES) == {heard: 20.0, ("running", ()): 3}


def test_an_engine_reports_every_series_though_it_is_zero() -> None:
    stats = EngineStats(incarnation="x", pages_total=8, cache_config=("4", "8"))
    report = engine_report("3", stats, 7.5)
    assert report.engine == "3" and report.incarnation == "x"
    expected = {
        (metric.name, word if isinstance(word, tuple) else (word,) if word else ())
        for metric in ENGINE_METRICS
        if metric.kind != "histogram" and metric not in (RESTARTS, ADAPTERS_INFO)
        for word in metric.words or ("",)
        if metric.name not in ("cache_config_info", "weights_info", "plugin_seconds")
    }
    config, lora = ("cache_config_info", ("4", "8")), (ADAPTERS_INFO.name, ("0", "", ""))
    weights = ("weights_info", ("default",))
    asked = (ASKED.name, ())
    assert {*report.gauges, *report.counters} == {*expected, config, lora, weights}
    assert report.gauges[asked] == 7.5
    assert report.gauges[config] == 1
    assert report.gauges["kv_cache_pages_by_state", ("free",)] == 8


def test_an_ingress_reports_every_series_though_it_is_zero() -> None:
    report = IngressCounters().report()
    numbers = {**report.gauges, **report.earliest, **report.counters}
    named = {name for name, _ in {**numbers, **report.histograms}}
    assert named == {metric.name for metric in INGRESS_METRICS}
    for metric in INGRESS_METRICS:
        for word in metric.words:
            assert numbers[metric.name, (word,) if isinstance(word, str) else word] == 0


def test_words_outside_the_closed_sets_make_no_series() -> None:
    stats = EngineStats(finished={"stop": 1, "moved": 2, "strange": 3}, rejected={"why": 4})
    report = engine_report("0", stats, 0.0)
    assert report.counters["request_success", ("stop",)] == 1
    assert report.counters["requests_moved", ()] == 2
    counts = IngressCounters()
    before = len(counts.report().counters)
    for path, status in [("/v1/completions", 200), ("/<script>", 404), ("/", 999), ("/x", None)]:
        counts.answered(path, status)
    after = counts.report().counters
    assert len(after) == before
    assert after["http_requests", ("/v1/completions", "2xx")] == 1
    assert after["http_requests", ("other", "4xx")] == 1
    assert after["http_requests", ("other", "none")] == 2
