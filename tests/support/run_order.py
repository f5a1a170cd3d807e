"""Puts test files that take long first, and keeps what each takes.

``tests/durations.json`` has the seconds of each file in the last run with ``--keep-durations``.
"""

import functools
import json
from collections import Counter
from pathlib import Path

import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
RAY = "tests/e2e/"
SLOWEST = 10  # files that the summary prints
GREW = 1.5  # times what durations.json says
GREW_SECONDS = 5.0


@functools.cache
def seconds_of_files() -> dict[str, float]:
    """Reads the seconds that each file took."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def sort_by_duration(items: list[pytest.Item]) -> None:
    """Puts tests/e2e first, then the files that took longest; files without a figure before them.

    The tests of a file keep their order.
    """
    seconds = seconds_of_files()

    def key(item: pytest.Item) -> tuple[bool, float, str]:
        file = item.nodeid.partition("::")[0]
        return not file.startswith(RAY), -seconds.get(file, float("inf")), file

    items.sort(key=key)


class FileDurations:
    """Sums the seconds of each file over all workers; runs in the process that prints."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the slowest files, and those that take longer than they did."""
        before = seconds_of_files()
        slowest = self._seconds.most_common(SLOWEST)
        if slowest and slowest[0][1] > GREW_SECONDS:
            terminalreporter.section("slowest files")
            for file, seconds in slowest:
                terminalreporter.line(f"{seconds:7.1f} s  {file}")
        grew = [
            f"{before[file]:7.1f} -> {seconds:.1f} s  {file}"
            for file, seconds in self._seconds.most_common()
            if file in before and seconds > max(GREW * before[file], before[file] + GREW_SECONDS)
        ]
        if grew:
            terminalreporter.section("files that take longer than tests/durations.json says")
            for line in grew:
                terminalreporter.line(line)
        if self._keep:
            kept = before | {file: round(value, 1) for file, value in self._seconds.items()}
            there = {file: kept[file] for file in sorted(kept) if Path(file).exists()}
            DURATIONS.write_text(json.dumps(there, indent=0) + "\n")
