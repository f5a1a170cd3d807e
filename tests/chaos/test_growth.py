"""Slopes of what a process holds."""

import os

import pytest
from growth import HOUR, Growth, Series, held_by


def test_slope_is_a_share_of_the_mean_for_an_hour() -> None:
    series = Series("x")
    for minute in range(61):
        series.add(60.0 * minute, 100 + minute / 6)  # 10 more in an hour
    assert series.per_hour() == pytest.approx(10 / 105)
    assert Series("x", [0.0, HOUR], [5.0, 5.0]).per_hour() == pytest.approx(0)
    assert Series("x", [0.0], [5.0]).per_hour() == 0
    assert Series("x", [0.0, 1.0], [0.0, 0.0]).per_hour() == 0


def test_only_what_grows_is_named_and_the_warm_up_does_not_count() -> None:
    growth = Growth(skip=1)
    growth.add(0.0, {"leak": 0.0, "flat": 900.0})
    for hour in range(1, 4):
        growth.add(hour * HOUR, {"leak": 100.0 + 5 * hour, "flat": 7.0, "falls": 9.0 - hour})
    lines, grown = growth.lines(0.01)
    assert grown == ["leak"] and len(lines) == 3


def test_what_this_process_holds() -> None:
    held = held_by([os.getpid(), 2**30])  # the second one does not exist
    assert held["RSS MiB"] > 10 and held["fds"] >= 3 and held["threads"] >= 1
