"""The text that Prometheus reads, parsed again."""

from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from rayfin.actors.metric import LATENCY_BOUNDS, VLLM_LATENCY_BOUNDS, Family, Histogram
from rayfin.actors.metrics.engine_stats import (
    CACHE_CONSTANTS,
    CACHE_LABELS,
    CACHE_TIERS,
    ENGINE_METRICS,
    ITERATION_BOUNDS,
    EngineStats,
    engine_report,
)
from rayfin.actors.metrics.ledger import Ledger
from rayfin.actors.metrics.render import render
from rayfin.deployments.telemetry.ingress_counters import INGRESS_METRICS, IngressCounters

FAMILIES = (*ENGINE_METRICS, *INGRESS_METRICS)
OURS = [family for family in FAMILIES if not family.alias_only]


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    histogram = Histogram(LATENCY_BOUNDS)
    for seconds in (0.001, 0.25, 0.3, 1.7, 9000.0):
        histogram.observe(seconds)
    own = {
        "request_queue_time_seconds": histogram,
        "iteration_tokens_total": Histogram(ITERATION_BOUNDS),
    }
    for engine in "01":
        stats = EngineStats(incarnation=engine, steps=7, pages_total=10, page_size=4)
        stats.tokens_cached, stats.cache_config = 3, tuple(CACHE_LABELS)
        stats.histograms = own
        ledger.apply(engine_report(engine, stats, 0.0), 0.0)
    ledger.apply(IngressCounters().report(), 0.0)
    return ledger


def families(ledger: Ledger, alias: str | None = None) -> dict[str, Metric]:
    text = render("m", alias, ledger, FAMILIES).decode()
    return {found.name: found for found in text_string_to_metric_families(text)}


def values(families: dict[str, Metric], name: str, **labels: str) -> list[float]:
    return [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def test_every_family_is_told_with_its_labels(ledger: Ledger) -> None:
    found = families(ledger)
    assert set(found) == {f"rayfin_{family.name}" for family in OURS}
    for family in OURS:
        base = {"model_name", "engine"} if family in ENGINE_METRICS else {"model_name"}
        for sample in found[f"rayfin_{family.name}"].samples:
            assert set(sample.labels) - {"le"} == base | set(family.labels)
            assert sample.labels["model_name"] == "m"
    assert values(found, "rayfin_engine_steps_total") == [7, 7]
    assert values(found, "rayfin_http_requests_total", status="5xx", handler="other") == [0]


def test_histograms_are_exact(ledger: Ledger) -> None:
    found = families(ledger)
    name = "rayfin_request_queue_time_seconds"
    assert values(found, f"{name}_count", engine="1") == [5]
    assert values(found, f"{name}_sum", engine="1") == [0.001 + 0.25 + 0.3 + 1.7 + 9000.0]
    assert values(found, f"{name}_bucket", engine="1", le="0.3") == [3]
    assert values(found, f"{name}_bucket", engine="1", le="+Inf") == [5]


def test_the_alias_has_vllms_names_labels_and_buckets(ledger: Ledger) -> None:
    found = families(ledger, "vllm")
    assert {name for name in found if name.startswith("rayfin_")} == set(families(ledger))
    aliases = {name for name in found if name.startswith("vllm:")}
    assert aliases == {f"vllm:{family.name}" for family in FAMILIES if family.alias}
    for name in aliases:
        for sample in found[name].samples:
            assert {"model_name", "engine"} <= set(sample.labels), name
    name = "vllm:request_queue_time_seconds_bucket"
    ends = {
        sample.labels["le"]
        for sample in found["vllm:request_queue_time_seconds"].samples
        if sample.name == name
    }
    assert ends == {*map(str, VLLM_LATENCY_BOUNDS), "+Inf"}
    assert values(found, name, engine="0", le="0.3") == [3]
    info = {theirs: ours for ours, theirs in CACHE_LABELS.items()} | CACHE_CONSTANTS
    (first, _) = found["vllm:cache_config_info"].samples
    assert first.labels == {"model_name": "m", "engine": "0", **info} and first.value == 1
    tiers = {
        sample.labels["source"]: sample.value
        for sample in found["vllm:prompt_tokens_cached_by_source"].samples
        if sample.labels["engine"] == "0"
    }
    assert tiers == {**dict.fromkeys(CACHE_TIERS, 0), "device": 3}
    assert values(found, "vllm:mm_cache_queries_total") == [0, 0]
    assert values(found, "vllm:lora_requests_info", max_lora="0", engine="1") == [0]
    assert values(found, "vllm:time_to_first_token_seconds_count") == [0]


def with_alias_bounds() -> Iterator[Family]:
    return (family for family in FAMILIES if family.alias_bounds)


def test_our_buckets_hold_vllms() -> None:
    stats = EngineStats()
    assert stats.histograms == {}
    names = {family.name for family in with_alias_bounds()}
    assert "inter_token_latency_seconds" in names and "e2e_request_latency_seconds" in names
    own = IngressCounters().report().histograms
    for family in with_alias_bounds():
        if (family.name, ()) in own:
            assert set(family.alias_bounds) <= set(own[family.name, ()].bounds)
