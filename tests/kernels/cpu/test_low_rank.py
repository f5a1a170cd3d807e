"""Adapters beside projections: against the reference row by row, and a row's bits."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.cpu.low_rank import (
    BLOCK_ROWS,
    AdapterParts,
    AdapterRows,
    PackedLowRank,
    Place,
)

Adapter = dict[str, tuple[torch.Tensor, torch.Tensor, float]]
"""A [rank, inputs], B [outputs, rank] and scale by the layer's path."""


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (values / shape[-1] ** 0.5).to(dtype)


def places_of(*counts: int) -> list[Place]:
    firsts = [0, *np.cumsum(counts).tolist()]
    names = zip(firsts, counts, strict=False)
    return [Place(str(number), first, count) for number, (first, count) in enumerate(names)]


def tables_of(
    kernels: CpuKernels, places: Sequence[Sequence[Place]], adapters: Sequence[Adapter]
) -> list[AdapterParts]:
    return [
        AdapterParts(places, {path: PackedLowRank(kernels, *own) for path, own in adapter.items()})
        for adapter in adapters
    ]


def expected_of(
    x: torch.Tensor, places: Sequence[Place], adapters: Sequence[Adapter], of_row: np.ndarray
) -> torch.Tensor:
    parts = []
    for place in places:
        low_rank = [adapter.get(place.path) for adapter in adapters]
        parts.append(reference.low_rank(x, low_rank, of_row.tolist(), place.count))
    return torch.cat(parts, dim=1)


@settings(max_examples=25)
@given(
    rows=st.sampled_from([1, 2, 5, 13, 40, 75]),
    ranks=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    inputs=st.integers(1, 90),
    counts=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    bfloat16=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape(
    kernels: CpuKernels,
    rows: int,
    ranks: list[int],
    inputs: int,
    counts: list[int],
    bfloat16: bool,
    seed: int,
) -> None:
    """Adapter n has no part n: its rows get zeros there, as do rows without an adapter."""
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    places = places_of(*counts)
    adapters: list[Adapter] = [
        {
            place.path: (
                normal(rank, inputs, seed=seed + number, dtype=dtype),
                normal(place.count, rank, seed=seed - number, dtype=dtype),
                0.5 + number,
            )
            for place in places
            if place.path != str(number)
        }
        for number, rank in enumerate(ranks)
    ]
    x = normal(rows, inputs, seed=seed) * inputs**0.5
    of_row = np.random.default_rng(seed).integers(-1, len(ranks), rows)
    grouped = AdapterRows(tables_of(kernels, [places], adapters), of_row)
    actual = grouped.deltas(kernels, 0, x, sum(counts))
    expected = expected_of(x, places, adapters, of_row)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_row_is_the_same_in_any_company(kernels: CpuKernels) -> None:
    places = [places_of(40, 33)]
    adapters: list[Adapter] = [
        {"0": (normal(16, 64, seed=n), normal(40, 16, seed=n + 9), 1.5)} for n in range(3)
    ]
    tables, x = tables_of(kernels, places, adapters), normal(60, 64, seed=4)
    of_row = np.arange(60) % 4 - 1
    every = AdapterRows(tables, of_row).deltas(kernels, 0, x, 73)
    for some in ([5], [5, 9], list(range(40)), list(range(59, 2, -1))):
        rows = AdapterRows(tables, of_row[some])
        assert torch.equal(rows.deltas(kernels, 0, x[some].contiguous(), 73), every[some])


def test_each_projection_has_its_own_parts(kernels: CpuKernels) -> None:
    places = [[Place("a", 0, 20)], [], [Place("b", 3, 20)]]
    adapters: list[Adapter] = [
        {name: (normal(4, 8, seed=n), normal(20, 4, seed=n), 1.0) for n, name in enumerate("ab")}
    ]
    x, of_row = normal(3, 8, seed=0), np.array([0, -1, 0])
    rows = AdapterRows(tables_of(kernels, places, adapters), of_row)
    for projection, name in ((0, "a"), (2, "b")):
        place = [Place(name, 0, 20)]
        first = places[projection][0].first
        actual = rows.deltas(kernels, projection, x, 23)[:, first : first + 20]
        torch.testing.assert_close(actual, expected_of(x, place, adapters, of_row))


@pytest.mark.parametrize("rows", [1, BLOCK_ROWS, BLOCK_ROWS + 1, 100])
def test_blocks_are_even_and_of_one_adapter(rows: int) -> None:
    grouped = AdapterRows([AdapterParts([[]], {})], np.repeat([0, -1], [rows, 2]))
    sizes = np.diff(grouped._starts)
    assert sizes[0] == 2 and sizes[1:].sum() == rows
    assert sizes.max() <= BLOCK_ROWS and np.ptp(sizes[1:]) <= 1
    assert grouped._order.tolist() == [rows, rows + 1, *range(rows)]
