"""Picks cases of a test with several parameters in which each pair of their values meets once.

Most faults need no more than two values to show (pairwise testing: D. R. Kuhn, D. R. Wallace,
A. M. Gallo, "Software fault interactions and implications for software testing", IEEE TSE 2004).
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest

Pair = tuple[tuple[str, int], tuple[str, int]]


def covering(cases: Sequence[dict[str, int]]) -> list[int]:
    """Chooses cases that have every pair of values of two parameters that any case has.

    ``cases`` map a parameter's name to the identity of its value. The next one is always that
    with most new pairs, the first of equals.

    Returns:
        Indices of ``cases``, in order. All of them where there are less than three parameters.
    """
    pairs = [set(combinations(sorted(case.items()), 2)) for case in cases]
    left: set[Pair] = set().union(*pairs)
    chosen: list[int] = []
    while left:
        best = max(range(len(cases)), key=lambda at: len(pairs[at] & left))
        chosen.append(best)
        left -= pairs[best]
    singles = [at for at, case in enumerate(cases) if len(case) < 2]
    return sorted({*chosen, *singles})


def without_repeated_pairs(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Finds the cases that a pairwise choice leaves out, of all tests with several parameters."""
    tests: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and getattr(item, "callspec", None) is not None:
            tests[item.nodeid.partition("[")[0], item.originalname].append(item)
    left_out: set[pytest.Item] = set()
    for cases in tests.values():
        chosen = covering(
            [{name: id(value) for name, value in case.callspec.params.items()} for case in cases]
        )
        left_out |= set(cases) - {cases[at] for at in chosen}
    return left_out
