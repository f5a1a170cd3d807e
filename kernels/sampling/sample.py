"""Sampling one token per row, batched, on the logits' device, without a host sync."""

from dataclasses import dataclass

import torch

from rayfin.kernels.sampling.filters import (
    apply_temperature,
    min_p_filter,
    top_k_filter,
    top_p_filter,
)
from rayfin.kernels.sampling.random import uniform
from rayfin.kernels.sampling.weights import fixed_point_weights

NOTHING = -1
"""The token of a row that cannot be sampled."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """How to sample each row; one entry per sampled row, on the logits' device."""

    temperature: torch.Tensor  # [S] fp32, 0 = greedy
    top_k: torch.Tensor  # [S] int64, 0 = off
    top_p: torch.Tensor  # [S] fp32, 1 = off
    min_p: torch.Tensor  # [S] fp32, 0 = off
    seed: torch.Tensor  # [S] int64
    position: torch.Tensor  # [S] int64, index in its request of the token being sampled
    all_greedy: bool  # known on the host, as the three below: work that no row asks for is skipped
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """One token per row: [S, V] any float dtype -> [S] int64.

    A greedy row gets the highest raw logit, the lowest index among equals. Any other row's token is
    a function of its own logits, parameters, seed and position: its batch mates do not matter. The
    order is vLLM's: temperature, min_p, top_k, top_p, draw. A bad row (`find_bad_rows`) gets -1.
    """
    highest, greedy = logits.max(dim=-1)
    greedy = torch.where(torch.isfinite(highest), greedy, NOTHING)
    if rows.all_greedy:
        return greedy
    filtered = apply_temperature(logits, rows.temperature)  # [S, V] fp32
    if rows.any_min_p:
        filtered = min_p_filter(filtered, rows.min_p)
    if rows.any_top_k:
        filtered = top_k_filter(filtered, rows.top_k)
    if rows.any_top_p:
        filtered = top_p_filter(filtered, rows.top_p)
    drawn = draw(filtered, uniform(rows.seed, rows.position))
    return torch.where((rows.temperature > 0) & (greedy != NOTHING), drawn, greedy)


def draw(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution in vocabulary order: never a token of weight zero.

    [S, V] fp32 (-inf = never), [S] fp64 in [0, 1) -> [S] int64: the first token at which the
    cumulative weight exceeds u times the total. Integer weights make the sums exact.
    """
    mass = fixed_point_weights(logits).cumsum(dim=-1)  # [S, V] int64, never steps back
    total = mass[:, -1]
    # u <= 1 - 2**-53, so that even rounded in fp64 the target stays below the total.
    target = (u * total.double()).long().unsqueeze(1)  # [S, 1]
    token = torch.searchsorted(mass, target, right=True).squeeze(1)
    return token.clamp(max=logits.shape[-1] - 1)  # only a bad row gets here without a token


def find_bad_rows(logits: torch.Tensor) -> torch.Tensor:
    """Rows that cannot be sampled: [S, V] -> [S] bool.

    True where a row holds a NaN or +inf, or nothing but -inf: then, and only then, its maximum
    is not finite.
    """
    return ~torch.isfinite(logits.amax(dim=-1))
