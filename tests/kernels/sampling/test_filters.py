"""Filters against the loop-written reference, and by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.sampling import filters
from rayfin.kernels.sampling.filters import (
    apply_temperature,
    fixed_point_weights,
    min_p_filter,
    stable_top,
    top_k_filter,
    top_p_filter,
)

NEVER = float("-inf")


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def kept(filtered: torch.Tensor) -> list[int]:
    return (filtered[0] > NEVER).nonzero().flatten().tolist()


def test_by_hand() -> None:
    logits = logits_of([0.1, 0.4, 0.05, 0.25, 0.2])
    assert kept(top_k_filter(logits, torch.tensor([2]))) == [1, 3]
    assert kept(top_k_filter(logits, torch.tensor([1]))) == [1]
    assert kept(top_p_filter(logits, torch.tensor([0.3]))) == [1]
    assert kept(top_p_filter(logits, torch.tensor([0.6]))) == [1, 3]
    assert kept(top_p_filter(logits, torch.tensor([0.9]))) == [0, 1, 3, 4]
    assert kept(min_p_filter(logits, torch.tensor([0.3]))) == [1, 3, 4]
    assert kept(min_p_filter(logits, torch.tensor([1.0]))) == [1]


def test_off() -> None:
    logits = torch.randn(2, 9)
    logits[0, 3] = NEVER
    logits[1, 3] = -60.0  # too unlikely to have a weight, but not forbidden
    assert torch.equal(top_k_filter(logits, torch.tensor([0, 9])), logits)
    assert torch.equal(top_p_filter(logits, torch.tensor([1.0, 1.0])), logits)
    assert torch.equal(min_p_filter(logits, torch.tensor([0.0, 0.0])), logits)


def test_equal_logits() -> None:
    equal = torch.zeros(1, 8)
    assert kept(top_k_filter(equal, torch.tensor([2]))) == list(range(8))  # all equal the second
    assert kept(top_p_filter(equal, torch.tensor([0.5]))) == [0, 1, 2, 3]
    assert kept(top_p_filter(equal, torch.tensor([1e-9]))) == [0]
    assert kept(top_p_filter(equal, torch.tensor([0.0]))) == [0]


def test_the_kept_logits_are_unchanged() -> None:
    logits = torch.randn(4, 30)
    for filtered in (
        top_k_filter(logits, torch.tensor([3, 4, 5, 0])),
        top_p_filter(logits, torch.tensor([0.2, 0.5, 0.9, 1.0])),
        min_p_filter(logits, torch.tensor([0.2, 0.5, 0.9, 0.0])),
    ):
        survivors = filtered > NEVER
        assert torch.equal(filtered[survivors], logits[survivors])
        assert survivors[3].all() and not survivors[0].all()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(1, 60),
    coarse=st.booleans(),
    parameters=st.lists(
        st.tuples(st.integers(0, 70), st.floats(0.01, 1.0), st.floats(0.0, 1.0)),
        min_size=1,
        max_size=4,
    ),
)
def test_same_as_reference(
    seed: int, vocabulary: int, coarse: bool, parameters: list[tuple[int, float, float]]
) -> None:
    """Random logits; coarse ones have many equals."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(parameters), vocabulary, generator=generator) * 3
    if coarse:
        logits = logits.round() * 0.5
    k = torch.tensor([p[0] for p in parameters])
    p = torch.tensor([p[1] for p in parameters])
    m = torch.tensor([p[2] for p in parameters])
    by_k, by_p, by_m = top_k_filter(logits, k), top_p_filter(logits, p), min_p_filter(logits, m)
    for row in range(len(parameters)):
        assert torch.equal(by_k[row], reference.top_k_filter(logits[row], int(k[row])))
        if not _near_the_edge_of_p(logits[row], float(p[row])):
            assert torch.equal(by_p[row], reference.top_p_filter(logits[row], float(p[row])))
        ratio = (
            torch.softmax(logits[row].double(), 0) / torch.softmax(logits[row].double(), 0).max()
        )
        if (ratio - float(m[row])).abs().min() > 1e-6:
            assert torch.equal(by_m[row], reference.min_p_filter(logits[row], float(m[row])))


def _near_the_edge_of_p(logits: torch.Tensor, p: float) -> bool:
    """Whether rounding decides if one token more is needed."""
    ordered = torch.softmax(logits.double(), 0).sort(descending=True).values.cumsum(0)
    return bool((ordered - p).abs().min() < 1e-6)


@pytest.mark.parametrize("guess", [1, 7, 64])
def test_top_p_sorts_more_where_the_guess_was_too_small(
    monkeypatch: pytest.MonkeyPatch, guess: int
) -> None:
    logits = torch.randn(3, 50).round()
    p = torch.tensor([0.1, 0.7, 0.999])
    expected = top_p_filter(logits, p)
    monkeypatch.setattr(filters, "NUCLEUS_GUESS", guess)
    assert torch.equal(top_p_filter(logits, p), expected)


def test_temperature() -> None:
    logits = torch.tensor([[1.0, 3.0, NEVER], [1.0, 3.0, NEVER], [1e4, -1e4, 0.0]])
    out = apply_temperature(logits, torch.tensor([0.5, 0.0, 1e-38]))
    assert out.tolist() == [[-4.0, 0.0, NEVER], [-2.0, 0.0, NEVER], [0.0, NEVER, NEVER]]
    half = apply_temperature(logits.bfloat16(), torch.tensor([0.5, 1.0, 1.0]))
    assert half.dtype == torch.float32


def test_weights_are_probabilities() -> None:
    logits = torch.randn(3, 40) * 4
    logits[1, 5] = NEVER
    weights = fixed_point_weights(logits)
    assert weights.dtype == torch.int64
    assert weights.max() == 2**40
    assert weights[1, 5] == 0
    share = weights.double() / weights.sum(-1, keepdim=True)
    expected = torch.softmax(logits.double(), dim=-1)
    torch.testing.assert_close(share, expected, rtol=1e-5, atol=1e-9)


def test_weights_of_a_large_vocabulary_do_not_overflow() -> None:
    weights = fixed_point_weights(torch.zeros(1, 2**20))
    assert int(weights.sum()) == 2**60
    assert math.isclose(float(weights.cumsum(-1)[0, -1]), 2.0**60)


@pytest.mark.parametrize("make", [torch.randn, lambda *s: torch.randn(*s).round()])
def test_stable_top(make: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    logits = make(5, 200)
    logits[0, :7] = NEVER
    logits[1, 3:9] = torch.tensor([0.0, -0.0, 0.0, -0.0, 9.0, 9.0])
    expected = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    for count in (0, 1, 13, 200):
        assert torch.equal(stable_top(logits, count), expected[:, :count])
