"""Greedy tokens and copies among allowed tokens, against the obvious form."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.shapes import TokenBits

INF, NAN = math.inf, math.nan
KINDS = ("none", "all", "one", "few", "many", "words")


def bits_of(kind: str, count: int, words: int, draw: torch.Generator) -> torch.Tensor:
    """[words] int32 of a row; bits beyond the vocabulary may be set, and mean nothing."""
    shape = (words, 32)
    if kind == "words":
        flags = (torch.rand(words, 1, generator=draw) < 0.3).expand(shape)
    else:
        share = {"none": 0.0, "all": 1.0, "one": 0.0, "few": 0.01, "many": 0.9}[kind]
        flags = torch.rand(shape, generator=draw) < share
    flags = flags.clone()
    if kind == "one":
        flags.view(-1)[int(torch.randint(count, (), generator=draw))] = True
    return (flags.long() << torch.arange(32)).sum(1).to(torch.int64).to(torch.int32)


def case(count: int, kinds: list[str], seed: int, distinct: int) -> tuple[torch.Tensor, TokenBits]:
    draw = torch.Generator().manual_seed(seed)
    words = -(-count // 32) + seed % 2
    wider = torch.randint(-distinct, distinct, (len(kinds), count + 3), generator=draw).float()
    rows = [row for row, kind in enumerate(kinds) if kind]
    masks = [bits_of(kinds[row], count, words, draw) for row in rows]
    stacked = torch.stack(masks) if masks else torch.zeros((0, words), dtype=torch.int32)
    return wider[:, :count], TokenBits(torch.tensor(rows, dtype=torch.int64), stacked)


def expected(x: torch.Tensor) -> list[int]:
    best, index = x.max(-1)
    return torch.where(torch.isfinite(best), index, -1).tolist()


@settings(max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(("", *KINDS)), min_size=1, max_size=7),
    count=st.sampled_from([1, 2, 31, 32, 33, 100, 4095, 4096, 4097, 9001]),
    distinct=st.sampled_from([1, 5, 10**6]),
    seed=st.integers(0, 99),
)
def test_the_first_of_the_highest_that_are_allowed(
    kernels: CpuKernels, kinds: list[str], count: int, distinct: int, seed: int
) -> None:
    x, allowed = case(count, kinds, seed, distinct)
    masked = reference.allowed_only(x, allowed)
    assert kernels.highest(x, allowed).tolist() == expected(masked)
    assert torch.equal(kernels.copy_allowed(x, allowed), masked)


@pytest.mark.parametrize("count", [40, 5000])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 17, 33, 39])
def test_only_allowed_values_must_be_finite(
    kernels: CpuKernels, count: int, bad: float, place: int
) -> None:
    x = torch.randn(2, count)
    x[:, place] = bad
    words = torch.full((2, -(-count // 32)), -1, dtype=torch.int32)
    words[1, place // 32] = ~(1 << place % 32)
    index = kernels.highest(x, TokenBits(torch.tensor([0, 1]), words))
    assert index[0] == -1
    others = x[1].clone()
    others[place] = -INF
    assert index[1] == others.argmax()
