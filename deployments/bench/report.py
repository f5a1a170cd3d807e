"""A run's figures as text, as a Markdown table, and as a plot."""

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


def comparison(
    title: str, runs: Mapping[str, Sequence[Figures]], unit: str = "output tokens"
) -> list[str]:
    """A Markdown table of several engines' medians over rounds.

    ``unit`` is what a request gets, tokens or vectors. The last column is the first engine's rate
    divided by each engine's.
    """
    first = next(iter(runs))
    rows = {name: _row(rounds) for name, rounds in runs.items()}
    heads = [f"{unit}/s", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "ITL p99 ms"]
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


def _row(rounds: Sequence[Figures]) -> list[float]:
    def ms(metric: str, percentile: str) -> float:
        return 1000 * median([getattr(getattr(run, metric), percentile) or 0.0 for run in rounds])

    return [
        median([run.output_per_second for run in rounds]),
        ms("ttft", "p50"),
        ms("ttft", "p99"),
        ms("tpot", "p50"),
        ms("itl", "p99"),
    ]


def _cells(spread: Spread) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99)
    return "".join(f"{'-' if value is None else f'{value * 1000:.2f}':>10}" for value in values)
