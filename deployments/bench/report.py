"""A run's figures as text and as a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench.measures import METRICS, Figures, Spread, Timeline

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


def lines(title: str, figures: Figures) -> list[str]:
    head = (
        f"{title}: {figures.requests} requests in {figures.seconds:.2f} s, {figures.failed} failed"
        f" · {figures.requests_per_second:.2f} requests/s"
        f" · {figures.output_per_second:.1f} output tokens/s"
        f" · {figures.tokens_per_second:.1f} tokens/s in all"
    )
    errors = [f"failed {count} x: {error}" for error, count in figures.errors.items()]
    return [
        *_goodput(figures),
        head,
        *_cached(figures),
        f"{'ms':<6}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99")),
        *(f"{NAMES[name]:<6}" + _cells(getattr(figures, name)) for name in METRICS),
        *errors,
    ]


def limits_text(limits: Mapping[str, float]) -> str:
    """Limits as a reader sees them: "TTFT 500 ms, TPOT 50 ms"."""
    return ", ".join(f"{NAMES[name]} {limit * 1000:g} ms" for name, limit in limits.items())


def plot(path: Path, timelines: Sequence[Timeline]) -> None:
    """Draws the cumulative distributions of TTFT and ITL to ``path``.

    Raises:
        InvalidConfig: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise InvalidConfig("plot needs matplotlib: pip install -e '.[bench]'", "plot") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    good = [line for line in timelines if line.error is None]
    kinds = {
        "TTFT": [line.ttft for line in good if line.ttft is not None],
        "ITL": [gap for line in good for gap in line.gaps],
    }
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(9, 3.5))
    for axis, (name, values) in zip(axes, kinds.items(), strict=True):
        ordered = sorted(values)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        axis.plot([value * 1000 for value in ordered], shares)
        axis.set_xlabel(f"{name}, ms")
        axis.set_ylabel("share of all")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def median(values: Sequence[float]) -> float:
    """The middle value (the upper one of two)."""
    return sorted(values)[len(values) // 2]


def _goodput(figures: Figures) -> list[str]:
    """The headline of a run that has limits."""
    if figures.goodput is None or figures.attainment is None:
        return []
    return [
        f"goodput {figures.goodput:.2f} requests/s: {figures.attainment:.1%} of "
        f"{figures.requests + figures.failed} requests within {limits_text(figures.limits)}"
    ]


def _cached(figures: Figures) -> list[str]:
    if figures.cached_tokens is None or not figures.prompt_tokens:
        return []
    share = figures.cached_tokens / figures.prompt_tokens
    return [f"{figures.prompt_tokens} prompt tokens, {share:.1%} of them from the prefix cache"]


def _cells(spread: Spread) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99)
    return "".join(f"{'-' if value is None else f'{value * 1000:.2f}':>10}" for value in values)
