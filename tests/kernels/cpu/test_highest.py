"""Greedy tokens against torch's argmax."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.sampling.sample import find_bad_rows

INF, NAN = math.inf, math.nan


@settings(max_examples=40)
@given(
    rows=st.integers(1, 9),
    count=st.sampled_from([1, 2, 15, 16, 17, 100, 4095, 4096, 4097, 9001]),
    distinct=st.sampled_from([1, 2, 5, 10**6]),
    seed=st.integers(0, 99),
)
def test_the_first_of_the_highest(
    kernels: CpuKernels, rows: int, count: int, distinct: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    wider = torch.randint(-distinct, distinct, (rows, count + 3), generator=draw).float()
    x = wider[:, :count]  # rows apart
    assert kernels.highest(x).tolist() == x.argmax(-1).tolist()


@pytest.mark.parametrize("count", [1, 16, 37, 5000])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_that_is_not_finite(kernels: CpuKernels, count: int, bad: float) -> None:
    x = torch.randn(count, count) if count < 100 else torch.randn(4, count)
    places = range(len(x)) if count < 100 else [0, 4095, 4096, count - 1]
    for row, place in enumerate(places):
        x[row, place] = bad
    assert kernels.highest(x).tolist() == [-1] * len(x)


def test_minus_infinity(kernels: CpuKernels) -> None:
    x = torch.full((3, 70), -INF)
    x[1, 69], x[2, 3] = -5.0, NAN
    assert kernels.highest(x).tolist() == [-1, 69, -1]
    assert (kernels.highest(x) < 0).tolist() == find_bad_rows(x).tolist()
