"""The index of a pause: what it comes to for laws that are known."""

import random
from collections.abc import Callable

import pytest

from rayfin.actors.scheduler.sessions.pause_law import (
    BUCKETS,
    HALF_LIFE_PAUSES,
    STARTS,
    WIDTHS,
    PauseLaw,
    best_ratio,
    bucket,
)

Draw = Callable[[random.Random], float]


def learned(draw: Draw, pauses: int = 3000) -> PauseLaw:
    law, rng = PauseLaw(), random.Random(0)
    for _ in range(pauses):
        law.observe(0.0, draw(rng), returned=True)
    return law


def test_it_starts_with_returns_that_grow_rare() -> None:
    law = PauseLaw()
    ages = [start + width / 2 for start, width in zip(STARTS, WIDTHS, strict=True)]
    indices = [law.index(age) for age in ages]
    assert indices == sorted(indices, reverse=True)
    assert indices[0] == pytest.approx(0.4 / (ages[0] + 0.5))


@pytest.mark.parametrize("mean", [0.3, 5.0, 200.0])
def test_without_a_memory_age_says_nothing(mean: float) -> None:
    law = learned(lambda rng: rng.expovariate(1 / mean))
    for age in (mean / 2, mean, 1.5 * mean):
        assert law.index(age) == pytest.approx(1 / mean, rel=0.35)


def test_a_fixed_pause_is_worth_most_shortly_before_its_end() -> None:
    """Tools of two minutes: who has waited a minute is kept, who is late is not."""
    law = learned(lambda _: 120.0)
    assert law.index(1.0) < law.index(70.0) < law.index(118.0)
    assert law.index(400.0) < law.index(1.0)


def test_who_is_late_of_two_kinds_is_of_the_slow_kind() -> None:
    law = learned(lambda rng: 1.0 if rng.random() < 0.7 else 150.0)
    assert law.index(0.5) > 20 * law.index(10.0)
    assert law.index(130.0) > 2 * law.index(10.0)


def test_who_never_returns_adds_seconds_alone() -> None:
    law = learned(lambda _: 5.0)
    before = law.rate(bucket(5.0))
    for _ in range(1000):
        law.observe(0.0, 3600.0, returned=False)
    assert law.rate(bucket(5.0)) < before / 1.2
    assert sum(law._returns) == 3000


def test_parts_of_a_pause_add_up() -> None:
    whole, parts = PauseLaw(), PauseLaw()
    whole.observe(0.0, 1000.0, returned=True)
    for since, until in ((0.0, 0.3), (0.3, 0.3), (0.3, 77.0)):
        parts.observe(since, until, returned=False)
    parts.observe(77.0, 1000.0, returned=True)
    assert parts._seconds == pytest.approx(whole._seconds)
    assert parts._returns == whole._returns


def test_old_pauses_are_forgotten_by_halves() -> None:
    law = learned(lambda _: 1.0, 20 * HALF_LIFE_PAUSES)
    assert sum(law._returns) <= 2 * HALF_LIFE_PAUSES


def test_the_best_time_to_keep() -> None:
    """Two buckets: to keep for both is best if the second one brings more."""
    assert best_ratio([0.1, 0.001], (1.0, 100.0)) == pytest.approx(0.1)
    assert 0.1 < best_ratio([0.1, 5.0], (1.0, 1.0)) < 5.0
    assert len(PauseLaw()._index) == BUCKETS
