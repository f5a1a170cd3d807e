"""Writes the table of faults and results in docs/reliability.md."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from results import Result

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- make chaos: begin -->", "<!-- make chaos: end -->"
HEADER = (
    *("fault", "failed / all", "recovery s", "longest gap ms", "wrong", "leaked", ""),
    *("streams", "seed", "load"),
)


def row_of(result: Result) -> list[str]:
    """The cells of a result's row."""
    cells = [f"{result.fault} (`{result.name}`)"]
    if result.skipped:
        return [*cells, "", "", "", "", "", f"not run: {result.skipped}", "", "", ""]
    recovery = "-" if result.recovery is None else f"{result.recovery:.1f}"
    allowed = f" ({result.allowed} allowed)" if result.allowed else ""
    return [
        *cells,
        f"{result.failed} / {result.total}{allowed}",
        recovery,
        f"{result.gap_ms:,.0f}",
        str(result.wrong),
        str(max(result.leaked, 0)),
        "held" if result.held else f"**broken**: {first_words(result.violations)}",
        str(result.streams),
        str(result.seed),
        f"{result.load:.1f}",
    ]


def first_words(violations: Sequence[str]) -> str:
    """The first violation, shortened to fit a cell."""
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    return f"{violations[0][:80]}{more}".replace("|", "/").replace("\n", " ").replace("`", "'")


def table(rows: Iterable[Sequence[str]]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def merged(page: str, results: Sequence[Result], order: Sequence[str], how: str) -> str:
    """Returns the page with the rows of ``results`` replaced.

    Args:
        order: the names of all cases, in the table's order.
        how: a sentence on the machine and the versions.
    """
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    rows = {name_in(line): cells(line) for line in old.splitlines() if "`)" in line}
    rows |= {result.name: row_of(result) for result in results}
    kept = [rows[name] for name in order if name in rows]
    return f"{before}{BEGIN}\n\n{how}\n\n{table(kept)}\n{END}{after}"


def name_in(line: str) -> str:
    """The name of a row's case."""
    return line.split("(`")[1].split("`)")[0]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def write(results: Sequence[Result], order: Sequence[str], how: str, page: Path = PAGE) -> None:
    page.write_text(merged(page.read_text(), results, order, how))
