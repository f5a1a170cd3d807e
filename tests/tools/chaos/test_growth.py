"""Slopes of what a process holds."""

import os

import pytest
from growth import HOUR, Growth, Series, held_by


def test_slope_is_a_share_of_the_mean_for_an_hour() -> None:
    series = Series("x")
    for minute in range(61):
        series.add(60.0 * minute, 100 + minute / 6)  # 10 more in an hour
    assert series.per_hour() == pytest.approx((10 / 105, 0))
    assert Series("x", [0.0, HOUR], [5.0, 5.0], [1, 1]).per_hour() == pytest.approx((0, 0))
    assert Series("x", [0.0], [5.0], [1]).per_hour() == (0, 0)
    assert Series("x", [0.0, 1.0], [0.0, 0.0], [1, 1]).per_hour() == (0, 0)


def test_a_new_process_is_no_growth_and_hides_none() -> None:
    still, grows = Series("still"), Series("grows")
    for minute in range(60):
        life, level = (1, 100.0) if minute < 30 else (2, 200.0)
        still.add(60.0 * minute, level + minute % 2, life)
        grows.add(60.0 * minute, 300 - level + minute / 2, life)
    slope, error = still.per_hour()
    assert abs(slope) < 2 * error
    slope, error = grows.per_hour()  # 30 more in an hour, though it ends with less
    assert slope == pytest.approx(30 / 165, rel=0.02) and error < slope / 100


def test_only_what_grows_is_named_and_the_warm_up_does_not_count() -> None:
    growth = Growth(skip=HOUR)
    growth.add(0.0, {"leak rss": 0.0, "flat": 900.0, "falls": 0.0}, {"leak": 1})
    for hour in range(1, 4):
        values = {"leak rss": 100.0 + 5 * hour, "flat": 7.0, "falls": 9.0 - hour}
        growth.add(hour * HOUR, values, {"leak": 1})
    lines, grown = growth.lines(0.01)
    assert grown == ["leak rss"] and len(lines) == 3


def test_what_this_process_holds() -> None:
    held = held_by([os.getpid(), 2**30])  # the second one does not exist
    assert held["RSS MiB"] > held["own MiB"] > 10 and held["fds"] >= 3 and held["threads"] >= 1
