"""Figures for people: tables for a terminal or a page, and a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench.measures import METRICS, Figures, Spread, Timeline

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


def lines(title: str, figures: Figures) -> list[str]:
    """One run, as text."""
    head = (
        f"{title}: {figures.requests} requests in {figures.seconds:.2f} s, {figures.failed} failed"
        f" · {figures.requests_per_second:.2f} requests/s"
        f" · {figures.output_per_second:.1f} output tokens/s"
        f" · {figures.tokens_per_second:.1f} tokens/s in all"
    )
    good = [] if figures.goodput is None else [f"goodput {figures.goodput:.2f} requests/s"]
    errors = [f"failed {count} x: {error}" for error, count in figures.errors.items()]
    return [
        head,
        *good,
        f"{'ms':<6}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99")),
        *(f"{NAMES[own]:<6}" + _cells(getattr(figures, own)) for own in METRICS),
        *errors,
    ]


def comparison(title: str, runs: Mapping[str, Sequence[Figures]]) -> list[str]:
    """A Markdown table of several engines' medians over rounds; ratios to the first one last."""
    first = next(iter(runs))
    rows = {name: _row(rounds) for name, rounds in runs.items()}
    heads = ["output tokens/s", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "ITL p99 ms"]
    table = [
        f"**{title}**",
        "",
        f"| engine | {' | '.join(heads)} | {first} / engine |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for name, row in rows.items():
        ratio = rows[first][0] / row[0] if row[0] else float("nan")
        cells = " | ".join("-" if value is None else f"{value:.1f}" for value in row)
        table.append(f"| {name} | {cells} | {ratio:.2f} |")
    return table


def plot(path: Path, timelines: Sequence[Timeline]) -> None:
    """TTFT and ITL of a run as cumulative shares, one picture.

    Raises:
        InvalidConfig: matplotlib is missing (``pip install -e '.[bench]'``).
    """
    try:
        import matplotlib
    except ImportError:
        raise InvalidConfig("plot needs matplotlib: pip install -e '.[bench]'", "plot") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    good = [own for own in timelines if own.error is None and own.pieces]
    kinds = {"TTFT": [own.ttft for own in good], "ITL": [gap for own in good for gap in own.gaps]}
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


def _row(rounds: Sequence[Figures]) -> list[float]:
    def of(spread: str, point: str) -> float:
        values = [getattr(getattr(own, spread), point) or 0.0 for own in rounds]
        return median(values) * 1000

    return [
        median([own.output_per_second for own in rounds]),
        of("ttft", "p50"),
        of("ttft", "p99"),
        of("tpot", "p50"),
        of("itl", "p99"),
    ]


def _cells(spread: Spread) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99)
    return "".join(f"{'-' if value is None else f'{value * 1000:.2f}':>10}" for value in values)
