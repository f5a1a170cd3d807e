"""The metrics of an offline engine as objects, with the classes of vLLM's ``get_metrics``."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rayfin.actors.metrics.engine_stats import ENGINE_METRICS, EngineStats, engine_report
from rayfin.actors.metrics.ledger import Ledger
from rayfin.actors.metrics.render import render

ALIAS = "vllm"


@dataclass(slots=True, kw_only=True)
class Metric:
    """A name and labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(slots=True, kw_only=True)
class Gauge(Metric):
    """A number now."""

    value: float


@dataclass(slots=True, kw_only=True)
class HistogramMetric(Metric):
    """Values so far: how many, their sum, and how many are at most each bound."""

    count: int
    sum: float
    buckets: dict[str, int] = field(default_factory=dict)


def read_metrics(stats: EngineStats, model: str) -> list[Metric]:
    """Returns the metrics of one engine, under Rayfin's names and under vLLM's."""
    ledger = Ledger()
    now = time.time()
    ledger.apply(engine_report("offline", stats, now), now)
    text = render(model, ALIAS, ledger, ENGINE_METRICS).decode()
    metrics: list[Metric] = []
    for family in text_string_to_metric_families(text):
        if family.type == "histogram":
            metrics += _histograms(family.name, family.samples)
            continue
        for sample in family.samples:
            if family.type == "counter" and sample.name.endswith("_total"):
                metrics.append(
                    Counter(name=family.name, labels=sample.labels, value=int(sample.value))
                )
            elif family.type == "gauge":
                metrics.append(Gauge(name=family.name, labels=sample.labels, value=sample.value))
    return metrics


def _histograms(name: str, samples: list[Sample]) -> Iterator[HistogramMetric]:
    """One for each set of labels, which differ in ``le`` no more."""
    known: dict[tuple[tuple[str, str], ...], HistogramMetric] = {}
    for sample in samples:
        labels = {label: value for label, value in sample.labels.items() if label != "le"}
        key = tuple(sorted(labels.items()))
        histogram = known.setdefault(
            key, HistogramMetric(name=name, labels=labels, count=0, sum=0.0)
        )
        if sample.name.endswith("_bucket"):
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            histogram.sum = sample.value
    yield from known.values()
