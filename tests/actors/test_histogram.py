"""Buckets, sums and growth, against a plain count."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfin.actors.metric import Histogram, one_two_five

BOUNDS = (0.5, 1.0, 2.5)
VALUES = st.lists(st.sampled_from([0.0, 0.5, 0.75, 1.0, 2.0, 2.5, 7.0]))


def filled(values: list[float]) -> Histogram:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    return histogram


@given(VALUES)
def test_bucket_ends_are_inclusive(values: list[float]) -> None:
    histogram = filled(values)
    ends = (*BOUNDS, float("inf"))
    assert histogram.cumulative() == [(end, sum(own <= end for own in values)) for end in ends]
    assert histogram.sum == sum(values) and histogram.count == len(values)


@given(VALUES, VALUES)
def test_growth_and_addition_are_inverse(before: list[float], more: list[float]) -> None:
    earlier, now = filled(before), filled(before + more)
    assert now.grown_since(earlier) == filled(more)
    assert now.grown_since(None) == now.grown_since(Histogram((1.0,))) == now
    earlier.add(filled(more))
    assert earlier == now == pickle.loads(pickle.dumps(now))


def test_many_at_once() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.75, 4)
    assert histogram == filled([0.75] * 4)


def test_fewer_buckets_hold_the_same_counts() -> None:
    histogram = filled([0.1, 0.6, 1.0, 3.0])
    assert histogram.cumulative((1.0,)) == [(1.0, 3), (float("inf"), 4)]
    with pytest.raises(ValueError):
        histogram.cumulative((0.7,))


def test_a_copy_stands_still() -> None:
    histogram = filled([1.0])
    copied = histogram.copy()
    histogram.observe(2.0)
    assert copied == filled([1.0])


def test_one_two_five() -> None:
    assert one_two_five(1) == (1,)
    assert one_two_five(99) == (1, 2, 5, 10, 20, 50)
    assert one_two_five(2000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
