"""The report: what is written where, and what cannot be."""

from pathlib import Path

import pytest
from core_report import Axes, Report, number, verdict


def test_blocks_come_in_order(tmp_path: Path) -> None:
    report = Report(tmp_path, draw=False)
    report.heading("One", 3)
    report.text("two\n   three")
    report.table(["a", "b"], [[1, "x"]])
    assert report.markdown == "### One\n\ntwo three\n\n| a | b |\n| --- | --- |\n| 1 | x |\n"


def test_rows_are_as_long_as_the_header(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Report(tmp_path, draw=False).table(["a", "b"], [[1]])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (4.56789, "4.57"), (62.5, "62.5"), (1234.5, "1,234")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_missed_targets_stand_out() -> None:
    assert (verdict(True), verdict(False)) == ("met", "**missed**")


def test_without_drawing_there_is_no_plot(tmp_path: Path) -> None:
    report = Report(tmp_path, draw=False)
    report.plot("name", "Title", Axes("x", "y"), {"line": ([1, 2], [3, 4])})
    assert report.markdown == "\n" and not list(tmp_path.iterdir())


def test_plots_are_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    for _ in range(2):
        report = Report(tmp_path)
        report.plot(
            "name",
            "Title",
            Axes("x", "y", True, True),
            {"a": ([1, 2], [3, 4]), "target": ([1], [2])},
        )
        assert report.markdown == "![Title](core_name.svg)\n"
        drawn.append((tmp_path / "core_name.svg").read_bytes())
    assert drawn[0] == drawn[1]
