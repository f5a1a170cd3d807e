"""How a metric is declared: once, at the field that holds its value.

    steps: int = counter("engine_steps", "Steps done.")

Fields are plain: a number, a ``Counter`` by the words of a label, or a ``Histogram``. So counting
costs an addition; ``CounterReport.read`` turns fields into series when it is asked.

Label sets are closed: model name and engine are the operator's, all other values are those that the
declaration names. No request can create a new series. Buckets include vLLM's, and finer ones.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal

Bounds = tuple[float, ...]


@dataclass(slots=True)
class Histogram:
    """Counts by bucket. One thread observes; another one may copy it meanwhile.

    Args:
        bounds: upper ends of the buckets, inclusive, ascending; beyond the last there is one more.
    """

    bounds: Bounds
    counts: list[int] = field(default_factory=list)  # [len(bounds) + 1]
    sum: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> "Histogram":
        return Histogram(self.bounds, self.counts.copy(), self.sum)

    def grown_since(self, earlier: "Histogram | None") -> "Histogram":
        """What was observed since ``earlier``; everything, if that had other buckets or is None."""
        if earlier is None or earlier.bounds != self.bounds:
            return self
        counts = [now - then for now, then in zip(self.counts, earlier.counts, strict=True)]
        return Histogram(self.bounds, counts, self.sum - earlier.sum)

    def add(self, more: "Histogram") -> None:
        """Observations of the same buckets, made elsewhere."""
        self.counts = [count + new for count, new in zip(self.counts, more.counts, strict=True)]
        self.sum += more.sum

    def cumulative(self, bounds: Bounds | None = None) -> list[tuple[float, int]]:
        """(upper end, observations up to it), infinity last; of ``bounds``, which are some of ours.

        Raises:
            ValueError: one of ``bounds`` is not a bound of this histogram.
        """
        totals, total = [], 0
        for count in self.counts:
            total += count
            totals.append(total)
        if bounds is None:
            buckets = list(zip(self.bounds, totals[:-1], strict=True))
        else:
            buckets = [(bound, totals[self.bounds.index(bound)]) for bound in bounds]
        return [*buckets, (float("inf"), total)]


def one_two_five(limit: int) -> Bounds:
    """1, 2, 5, 10, 20, 50 ... up to ``limit``: buckets of token counts."""
    steps = (factor * 10**power for power in range(len(str(limit))) for factor in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= limit)


Word = str | tuple[str, ...]
"""A value of a metric's label, or of each of its labels."""

TTFT_BOUNDS: Bounds = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
VLLM_ITL_BOUNDS: Bounds = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
ITL_BOUNDS: Bounds = (0.0001, 0.0005, 0.001, 0.0025, 0.005, *VLLM_ITL_BOUNDS)
VLLM_LATENCY_BOUNDS: Bounds = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LATENCY_BOUNDS: Bounds = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *VLLM_LATENCY_BOUNDS)
COMPILE_BOUNDS: Bounds = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric name. Its series have the label model_name, those of an engine also engine."""

    name: str  # without prefix; a counter's without _total
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()  # besides model_name and engine
    words: tuple[Word, ...] = ()  # the closed set of their values; (): those of the value
    bounds: Bounds = ()  # of a histogram; (): by the model's length
    earliest: bool = False  # a gauge of several processes is their least; else they add up
    alias: bool = False  # vLLM has it
    alias_only: bool = False  # vLLM alone has it
    alias_labels: tuple[str, ...] = ()  # if vLLM names them differently
    alias_bounds: Bounds = ()  # if vLLM has fewer buckets
    alias_constants: tuple[tuple[str, str], ...] = ()  # further labels of vLLM's


def counter(
    name: str, help: str, label: str = "", words: tuple[Word, ...] = (), **more: Any
) -> Any:
    """Declares a field that only grows."""
    return _number("counter", name, help, label, words, **more)


def gauge(name: str, help: str, label: str = "", words: tuple[Word, ...] = (), **more: Any) -> Any:
    """Declares a field that is what it is now."""
    return _number("gauge", name, help, label, words, **more)


def histogram(name: str, help: str, bounds: Bounds, **more: Any) -> Any:
    """Declares a field of the type ``Histogram``."""
    metric = Family(name=name, kind="histogram", help=help, bounds=bounds, **more)
    return field(default_factory=lambda: Histogram(bounds), metadata={"metric": metric})


def _number(
    kind: Literal["gauge", "counter"],
    name: str,
    help: str,
    label: str,
    words: tuple[Word, ...],
    *,
    labels: tuple[str, ...] = (),
    default: float = 0,
    **more: Any,
) -> Any:
    labels = (label,) if label else labels
    metric = Family(name=name, kind=kind, help=help, labels=labels, words=words, **more)
    if labels:
        return field(default_factory=Counter, metadata={"metric": metric})
    return field(default=default, metadata={"metric": metric})


@cache
def declared(kind: Any) -> tuple[tuple[str, Family], ...]:
    """Returns the fields of a dataclass that are metrics, in order, and their declarations."""
    metrics = ((one.name, one.metadata.get("metric")) for one in fields(kind))
    return tuple((name, metric) for name, metric in metrics if metric is not None)


def metrics_of(*kinds: type) -> tuple[Family, ...]:
    """Returns the metrics that dataclasses declare."""
    return tuple(metric for kind in kinds for _, metric in declared(kind))
