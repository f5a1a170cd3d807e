"""The counter-based random numbers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.sampling.sample import uniform

KNOWN = [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.7238582745899125]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_same_as_python_integers(seed: int, position: int) -> None:
    drawn = uniform(torch.tensor([seed]), torch.tensor([position]))
    assert drawn.dtype == torch.float64
    assert float(drawn) == reference.uniform(seed, position)


def test_known_values() -> None:
    """Pinned: a change here changes the tokens of every seeded request."""
    seeds, positions = torch.tensor([0, 0, 1, -1]), torch.tensor([0, 1, 0, 7])
    assert uniform(seeds, positions).tolist() == KNOWN


def _uniformity(u: torch.Tensor) -> float:
    """Chi-square of 100 bins: 99 expected, standard deviation 14."""
    counts = torch.histc(u, bins=100, min=0.0, max=1.0)
    expected = len(u) / 100
    return float(((counts - expected) ** 2 / expected).sum())


def test_uniform_over_positions_and_over_seeds() -> None:
    n = 50_000
    many, one = torch.arange(n), torch.full((n,), 7)
    for u in (uniform(one, many), uniform(many, one), uniform(many, many)):
        assert bool(((u >= 0) & (u < 1)).all())
        assert _uniformity(u) < 99 + 5 * 14
        pairs = torch.stack([u[:-1], u[1:]])
        assert torch.corrcoef(pairs)[0, 1].abs() < 5 / n**0.5
    streams = torch.stack([uniform(one, many), uniform(one + 1, many)])
    assert torch.corrcoef(streams)[0, 1].abs() < 5 / n**0.5


def test_distinct_streams() -> None:
    seeds = torch.arange(300).repeat_interleave(300)
    positions = torch.arange(300).repeat(300)
    assert len(uniform(seeds, positions).unique()) == 300 * 300
