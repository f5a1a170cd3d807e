"""The Markdown report, with plots, that the sections of ``core.py`` write."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Points = tuple[Sequence[float], Sequence[float]]
"""x and y of one line of a plot."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The labels of a plot's axes, and whether they are logarithmic."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False


class Report:
    """Collects Markdown in order and draws plots into ``folder``.

    Args:
        folder: the folder of the plots and of the page that links to them.
        draw: whether to draw plots, which needs matplotlib.
    """

    def __init__(self, folder: Path, *, draw: bool = True) -> None:
        self._folder = folder
        self._draw = draw
        self._blocks: list[str] = []

    @property
    def markdown(self) -> str:
        return "\n\n".join(self._blocks) + "\n"

    def heading(self, text: str, level: int = 2) -> None:
        self._blocks.append(f"{'#' * level} {text}")

    def text(self, text: str) -> None:
        """Adds a paragraph; line breaks within it are ignored."""
        self._blocks.append(" ".join(text.split()))

    def code(self, text: str) -> None:
        self._blocks.append(f"```\n{text.strip()}\n```")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Adds a table with cells formatted by ``str``.

        Raises:
            ValueError: a row is longer or shorter than the header.
        """
        lines = [header, ["---"] * len(header), *rows]
        if any(len(row) != len(header) for row in lines):
            raise ValueError(f"rows of {header} differ in length")
        self._blocks.append("\n".join(f"| {' | '.join(map(str, row))} |" for row in lines))

    def plot(
        self, name: str, title: str, axes: Axes, lines: Mapping[str, Points], *, dots: bool = True
    ) -> None:
        """Plots ``lines`` to ``core_NAME.svg``; the line named "target" is dashed."""
        if not self._draw:
            return
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as pyplot

        pyplot.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}
        figure, plot = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        for label, (x, y) in lines.items():
            style = "--" if label == "target" else "-"
            marker = "o" if dots and style == "-" else ""
            plot.plot(x, y, style, marker=marker, markersize=4, linewidth=1.2, label=label)
        plot.set(title=title, xlabel=axes.x, ylabel=axes.y)
        if axes.log_x:
            plot.set_xscale("log", base=2)
            plot.xaxis.set_major_formatter("{x:,.0f}")
        if axes.log_y:
            plot.set_yscale("log")
        plot.grid(alpha=0.3)
        plot.legend()
        path = self._folder / f"core_{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        self._blocks.append(f"![{title}]({path.name})")


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie."""
    return float(np.quantile(np.asarray(values), share))


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def number(value: float, digits: int = 3) -> str:
    """Formats a value with significant digits, commas and no exponent: 0.0123, 4.5, 1,230."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - int(np.floor(np.log10(abs(value)))))
    return f"{value:,.{decimals}f}"


def milliseconds(seconds: float) -> str:
    return number(1e3 * seconds)


def microseconds(seconds: float) -> str:
    return number(1e6 * seconds)


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"
