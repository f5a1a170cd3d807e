"""What of the tests runs in which tier, and in which order."""

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from file_scheduling import FileScheduling
from run_order import RAY, sort_by_duration
from tiers import THOROUGH, covering, few, why_thorough


def test_a_pairwise_choice_has_every_pair() -> None:
    names = ("a", "b", "c", "d")
    cases = [dict(zip(names, values, strict=True)) for values in product(*map(range, (5, 4, 3, 2)))]
    chosen = covering(cases)
    for one, other in combinations(names, 2):
        pairs = {(cases[at][one], cases[at][other]) for at in chosen}
        assert pairs == {(case[one], case[other]) for case in cases}
    assert 20 <= len(chosen) <= 26  # of 120; no choice has fewer than 20


def test_cases_of_one_or_two_parameters_all_stay() -> None:
    cases = [{"a": 1}, {"a": 2}, *({"a": a, "b": b} for a in range(3) for b in range(4))]
    assert covering(cases) == list(range(len(cases)))


def test_few_values_are_spread_and_the_others_thorough() -> None:
    values = few(range(1, 14), 5)
    assert [value for value in values if isinstance(value, int)] == [1, 4, 7, 10, 13]
    assert sorted(value.values[0] for value in values if not isinstance(value, int)) == [
        *(2, 3, 5, 6, 8, 9, 11, 12)
    ]


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_ray_first_then_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "run_order.seconds_of_files", lambda: {"tests/a.py": 1.0, "tests/b.py": 9.0}
    )
    names = ["tests/a.py::y", "tests/a.py::x", "tests/b.py::t", "tests/new.py::t", f"{RAY}c.py::t"]
    items: list[Any] = [Item(name) for name in names]
    sort_by_duration(items)
    order = [item.nodeid for item in items]
    assert order == [names[4], names[3], names[2], names[0], names[1]]


def test_files_go_to_workers_whole_and_ray_to_one() -> None:
    scheduling = FileScheduling.__new__(FileScheduling)
    scope = scheduling._split_scope
    assert scope("tests/a.py::One::x") == scope("tests/a.py::y[1::2]") == "tests/a.py"
    assert scope(f"{RAY}a.py::x") == scope(f"{RAY}b.py::x") == RAY


def test_thorough_tests_exist() -> None:
    root = Path(__file__).parents[1]
    for name in THOROUGH:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}" in (root / file).read_text() or not test, name
    assert why_thorough("tests/e2e/test_wheel.py::test_x") == THOROUGH["tests/e2e/test_wheel.py"]
    assert why_thorough("tests/e2e/test_api.py::test_x") is None
