"""Sampling: greedy rows, the distribution, seeds, independence of batch mates, bad rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.sampling.sample import draw, find_bad_rows, sample
from rayfin.kernels.shapes import SamplingRows

NEVER = float("-inf")


def rows_of(
    *,
    temperature: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
    seed: list[int] | None = None,
    position: list[int] | None = None,
) -> SamplingRows:
    n = len(temperature)
    top_k, top_p, min_p = top_k or [0] * n, top_p or [1.0] * n, min_p or [0.0] * n
    return SamplingRows(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        seed=torch.tensor(seed or list(range(n))),
        position=torch.tensor(position or [0] * n),
        all_greedy=not any(temperature),
        any_top_k=any(top_k),
        any_top_p=any(p < 1 for p in top_p),
        any_min_p=any(min_p),
    )


def pick(rows: SamplingRows, index: torch.Tensor) -> SamplingRows:
    """The same rows in another order, or some of them."""
    return SamplingRows(
        temperature=rows.temperature[index],
        top_k=rows.top_k[index],
        top_p=rows.top_p[index],
        min_p=rows.min_p[index],
        seed=rows.seed[index],
        position=rows.position[index],
        all_greedy=not bool(rows.temperature[index].any()),
        any_top_k=bool(rows.top_k[index].any()),
        any_top_p=bool((rows.top_p[index] < 1).any()),
        any_min_p=bool(rows.min_p[index].any()),
    )


def mixed_rows(n: int) -> SamplingRows:
    return rows_of(
        temperature=[[1.0, 0.0, 0.7, 1.5][i % 4] for i in range(n)],
        top_k=[[0, 5, 20][i % 3] for i in range(n)],
        top_p=[[1.0, 0.9, 0.5, 1.0, 0.99][i % 5] for i in range(n)],
        min_p=[[0.0, 0.0, 0.1][i % 3] for i in range(n)],
        seed=[i * 977 - 5000 for i in range(n)],
        position=[i % 11 for i in range(n)],
    )


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    possible = probabilities > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_lowest_highest(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 50, dtype=dtype)
    logits[0, [7, 30]] = 2.0
    logits[1, 49] = 0.5
    tokens = sample(logits, rows_of(temperature=[0.0, 0.0, 0.0]))
    assert tokens.tolist() == [7, 49, 0]


def test_greedy_rows_beside_sampling_rows() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 300).round()  # many equals
    rows = mixed_rows(40)
    tokens = sample(logits, rows)
    greedy = rows.temperature == 0
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
    assert not torch.equal(tokens[~greedy], logits.argmax(-1)[~greedy])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_distribution(temperature: float) -> None:
    n = 20_000
    logits = torch.tensor([1.0, 0.0, NEVER, 2.0, -1.0, 0.5, NEVER])
    rows = rows_of(temperature=[temperature] * n, seed=[3] * n, position=list(range(n)))
    tokens = sample(logits.expand(n, -1), rows)
    probabilities = torch.softmax(logits.double() / temperature, dim=0)
    assert chi_square(tokens, probabilities) < 4 + 6 * 8**0.5  # 4 degrees of freedom
    assert chi_square(tokens, torch.softmax(logits.double() / 1.2, dim=0)) > 50  # it can fail


def test_distribution_after_all_filters() -> None:
    n = 20_000
    probabilities = torch.tensor([0.02, 0.3, 0.18, 0.001, 0.24, 0.1, 0.159], dtype=torch.float64)
    rows = rows_of(
        temperature=[1.0] * n,
        min_p=[0.05] * n,
        top_k=[5] * n,
        top_p=[0.85] * n,
        seed=list(range(n)),
    )
    tokens = sample(probabilities.log().float().expand(n, -1), rows)
    # min_p drops 3 (and keeps 0: 0.02 >= 0.015), top_k drops 0, top_p of the rest drops 5
    left = torch.tensor([0, 0.3, 0.18, 0, 0.24, 0, 0.159], dtype=torch.float64)
    assert chi_square(tokens, left / left.sum()) < 3 + 6 * 6**0.5


@settings(max_examples=25)
@given(seed=st.integers(0, 100_000), vocabulary=st.integers(25, 80))
def test_same_as_reference(seed: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, vocabulary, generator=generator) * 2
    rows = mixed_rows(12)
    assert torch.equal(sample(logits, rows), reference.sample(logits, rows))


def test_alone_as_in_a_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(33, 5003) * 2
    rows = mixed_rows(33)
    together = sample(logits, rows)
    for i in range(33):
        index = torch.tensor([i])
        assert sample(logits[index], pick(rows, index)) == together[i]
    order = torch.randperm(33)
    assert torch.equal(sample(logits[order], pick(rows, order)), together[order])


def test_seed_and_position_decide() -> None:
    logits = torch.zeros(64, 1000)
    rows = rows_of(temperature=[1.0] * 64, seed=[1] * 64, position=list(range(64)))
    tokens = sample(logits, rows)
    assert torch.equal(tokens, sample(logits, rows))
    assert len(tokens.unique()) > 55
    other = rows_of(temperature=[1.0] * 64, seed=[2] * 64, position=list(range(64)))
    assert (tokens == sample(logits, other)).sum() < 5
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    sample(logits, rows)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_draw_never_gives_an_impossible_token() -> None:
    logits = torch.full((4, 6), NEVER)
    logits[:, [1, 3]] = 0.0
    last_u = 1 - 2.0**-53
    u = torch.tensor([0.0, 0.5 - 2.0**-53, 0.5, last_u], dtype=torch.float64)
    assert draw(logits, u).tolist() == [1, 1, 3, 3]
    torch.manual_seed(0)
    wide = torch.randn(1, 100_003)
    wide[0, 0] = wide[0, -1] = NEVER
    assert draw(wide, torch.tensor([last_u], dtype=torch.float64)).item() == 100_001
    assert draw(wide, torch.tensor([0.0], dtype=torch.float64)).item() == 1


@pytest.mark.parametrize("extra", [0, 1, 2, 63, 64, 65])
def test_the_last_draw_stays_below_a_total_that_float64_rounds(extra: int) -> None:
    possible = 2**18 + extra  # total 2**58 and more: fp64 keeps multiples of 64 of it
    logits = torch.full((1, possible + 2), -27.7)  # weights are odd integers
    logits[0, possible - 1] = 0.0
    logits[0, : 2**18 - 2] = 0.0
    logits[0, possible:] = NEVER
    last_u = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert draw(logits, last_u).item() == possible - 1


def test_top_k_1_is_greedy() -> None:
    logits = torch.randn(20, 100)
    rows = rows_of(temperature=[5.0] * 20, top_k=[1] * 20)
    assert torch.equal(sample(logits, rows), logits.argmax(-1))


def test_bad_rows() -> None:
    logits = torch.randn(6, 9)
    logits[1, 4] = float("nan")
    logits[2, 0] = float("inf")
    logits[3] = NEVER
    logits[4, :8] = NEVER  # one token left: a good row
    assert find_bad_rows(logits).tolist() == [False, True, True, True, False, False]
    rows = rows_of(temperature=[1.0] * 6, top_k=[3] * 6, top_p=[0.9] * 6, min_p=[0.1] * 6)
    tokens = sample(logits, rows)
    assert (tokens < 0).tolist() == find_bad_rows(logits).tolist()
    greedy = sample(logits, rows_of(temperature=[0.0] * 6))
    assert (greedy < 0).tolist() == find_bad_rows(logits).tolist()
    good = torch.tensor([0, 4, 5])
    assert torch.equal(sample(logits[good], pick(rows, good)), tokens[good])
    assert tokens[4] == 8
