"""The quick text is the library's, byte for byte, whatever comes and goes."""

import random

import httpx
import pytest

from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.metrics.families import FAMILIES
from rayfin.actors.metrics.hub import CONTENT_TYPE, listen
from rayfin.actors.metrics.ledger import INGRESSES, CounterReport, Ledger, engine_report
from rayfin.actors.metrics.render import Writer, render
from rayfin.actors.scheduler.state.counters import EngineCounters
from rayfin.deployments.telemetry.ingress_counters import IngressCounters

pytestmark = pytest.mark.slow(reason="renders many ledgers")

MODEL = 'the "model"'


def engine(name: str, life: int, seed: int) -> CounterReport:
    rng = random.Random(seed)
    stats = EngineStats(incarnation=f"{name}.{life}", steps=seed, pages_total=64, page_size=16)
    stats.generation_tokens = seed * 10 ** rng.randrange(9)
    stats.step_seconds = seed * rng.random()
    stats.histograms = EngineCounters(1024).histograms()
    for histogram in stats.histograms.values():
        histogram.observe(rng.random() * 10 ** rng.randrange(-4, 5), rng.randrange(9))
    return engine_report(name, stats, 1.7e9 + rng.random())


@pytest.mark.parametrize("alias", [None, "vllm"])
def test_it_writes_what_the_library_writes(alias: str | None) -> None:
    ledger, writer, counts = Ledger(), Writer(MODEL, alias), IngressCounters()
    assert writer.write(ledger) == render(MODEL, alias, ledger)
    for step in range(40):
        counts.ttft.observe(step / 7)
        counts.answered("/v1/completions", 200)
        if step != 0:
            ledger.apply(counts.report(), float(step))
        ledger.apply(engine("01"[step % 2], step // 9, step), float(step))
        if step == 20:
            ledger.drop_gauges("0")
        if step == 30:
            ledger.drop_silent(INGRESSES, 1e9)
        assert writer.write(ledger) == render(MODEL, alias, ledger)
        text = writer.write(ledger.copy())
        assert text == render(MODEL, alias, ledger)
    assert text.count(b"# TYPE rayfin_") == sum(not family.alias_only for family in FAMILIES)


def test_the_port_tells_the_text_as_it_is_now() -> None:
    texts = iter((b"one", b"two"))
    server = listen(0, lambda: next(texts))
    try:
        for expected in (b"one", b"two"):
            answer = httpx.get(f"http://127.0.0.1:{server.server_port}/metrics", timeout=60)
            assert answer.content == expected and answer.headers["content-type"] == CONTENT_TYPE
            assert "content-encoding" not in answer.headers
        with pytest.raises(OSError, match="in use"):
            listen(server.server_port, lambda: b"")
    finally:
        server.shutdown()
        server.server_close()
