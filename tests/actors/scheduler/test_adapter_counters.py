"""What an engine says of its adapters, while requests wait for them, run and end."""

import pytest

from harness import Harness, make_harness
from rayfin.actors.adapters.part import AdapterFacts, AdapterRef, AdapterStats, AdapterUsage
from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.messages import EngineRequest
from rayfin.actors.metric import Histogram
from rayfin.actors.scheduler.adapter_counters import AdapterCounters


def adapter(name: str) -> AdapterRef:
    return AdapterRef(name.encode().hex() * 16, name, f"/{name}")


def with_adapter(h: Harness, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A request whose ``add`` names the adapter."""
    real = h.engine.add

    def add(source: EngineRequest) -> None:
        source.use(adapter(name))
        real(source)

    with monkeypatch.context() as patched:
        patched.setattr(h.engine, "add", add)
        h.add(6, 3)


def of(h: Harness) -> AdapterStats:
    return h.engine.stats().adapters


def test_from_the_lobby_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    h = make_harness(max_loras=1, step_seconds=0.01)
    h.executor.prepare_seconds["slow"] = 1.0
    for name in ("quick", "slow", "other"):
        with_adapter(h, monkeypatch, name)
    h.add(6, 3)
    assert (of(h).loading, of(h).requests_waiting) == (1, 1)
    h.step()
    assert of(h).running == ("quick",) and of(h).waiting == ("other", "slow")
    assert of(h).labels == ("1", "quick", "other,slow")
    h.run()
    h.check()
    assert of(h) == AdapterStats(1, loads={"ok": 0, "failed": 0})


def test_an_engine_without_adapters_says_so() -> None:
    assert of(make_harness()) == AdapterStats()
    assert AdapterStats().labels == ("0", "", "")


def test_news_of_the_runner() -> None:
    counters = AdapterCounters(Histogram(()))
    counters.observe(AdapterUsage(("a", "b"), 300, (0.5, 0.25), 1, 0))
    counters.observe(AdapterUsage(("b", "c"), 250, (0.25,), 0, 1))
    stats = counters.stats([AdapterFacts(at_once=4)], [], loading=0, requests_waiting=0)
    assert stats.resident == {"b", "c"} and stats.bytes == 250
    assert stats.loads == {"ok": 3, "failed": 1} and stats.evicted == 1
    assert counters.load.sum == 1.0
    counters.restart()
    after = counters.stats([AdapterFacts(at_once=4)], [], loading=0, requests_waiting=0)
    assert after.resident == frozenset() and after.bytes == 0
    assert after.loads == stats.loads and after.evicted == 1


def test_a_runner_that_is_replaced_holds_none() -> None:
    h = make_harness(max_loras=2)
    h.engine.lifecycle.state.counters.of_adapters.observe(AdapterUsage(("a",), 10))
    assert of(h).resident == {"a"}
    h.engine.replace_runners(RunnerGroupFailed("planted"))
    assert of(h).resident == frozenset()
