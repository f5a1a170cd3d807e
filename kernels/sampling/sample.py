"""Samples one token per row on the logits' device, without a host sync; log-probabilities."""

import torch

from rayfin.kernels.sampling.filters import (
    apply_temperature,
    fixed_point_weights,
    min_p_filter,
    stable_top,
    top_k_filter,
    top_p_filter,
)
from rayfin.kernels.shapes import SamplingRows

NOTHING = -1
"""The token of a row that cannot be sampled."""


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """One token per row: [S, V] any float dtype -> [S] int64.

    A greedy row gets the highest raw logit, the lowest index among equals. Any other row's token is
    a function of its logits, parameters, seed and position, independent of the other rows. The
    order is vLLM's: temperature, min_p, top_k, top_p, draw. A bad row (`find_bad_rows`) gets -1.
    """
    highest, greedy = logits.max(dim=-1)
    greedy = torch.where(torch.isfinite(highest), greedy, NOTHING)
    if rows.all_greedy:
        return greedy
    drawn = draw(filtered(logits, rows), uniform(rows.seed, rows.position))
    return torch.where((rows.temperature > 0) & (greedy != NOTHING), drawn, greedy)


def filtered(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """What tokens are drawn from: [S, V] any float dtype -> [S, V] fp32, -inf where never."""
    left = apply_temperature(logits, rows.temperature)
    if rows.any_min_p:
        left = min_p_filter(left, rows.min_p)
    if rows.any_top_k:
        left = top_k_filter(left, rows.top_k)
    if rows.any_top_p:
        left = top_p_filter(left, rows.top_p)
    return left


def draw(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverts the cumulative distribution in vocabulary order; never draws weight zero.

    [S, V] fp32 (-inf = never), [S] fp64 in [0, 1) -> [S] int64: the first token at which the
    cumulative weight exceeds u times the total. Integer weights make the sums exact.
    """
    mass = fixed_point_weights(logits).cumsum(dim=-1)  # [S, V] int64, never decreases
    total = mass[:, -1]
    # u <= 1 - 2**-53, so that even rounded in fp64 the target stays below the total.
    target = (u * total.double()).long().unsqueeze(1)  # [S, 1]
    token = torch.searchsorted(mass, target, right=True).squeeze(1)
    return token.clamp(max=logits.shape[-1] - 1)  # only a bad row has no token


def find_bad_rows(logits: torch.Tensor) -> torch.Tensor:
    """Rows that cannot be sampled: [S, V] -> [S] bool.

    These are rows with NaN or +inf, or with only -inf: exactly those whose maximum is not finite.
    """
    return ~torch.isfinite(logits.amax(dim=-1))


# Random numbers as a pure function of (seed, position): no generator, no state.
#
# A request's draw for its token at `position` is the same in any batch, step, process and device,
# so a replay after a preemption or a restart repeats the same tokens.
# Counter-based generation is from Salmon et al., SC 2011 ("Parallel random numbers: as easy as 1,
# 2, 3"); the mixing function is splitmix64's (Steele, Lea and Flood, OOPSLA 2014).

# splitmix64's constants as signed 64-bit integers: torch has no full uint64 arithmetic, and int64
# products wrap around to the same 64 bits.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 bit patterns: zeros come in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer: a bijection in which each input bit flips half of the bits."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def random_bits(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """64 random bits per row: [S] int64, [S] int64 -> [S] int64.

    The seed is mixed before the position is added: neighbouring seeds give unrelated streams.
    """
    return _mix(_mix(seed + GOLDEN) + (position + 1) * GOLDEN)


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) per row, a multiple of 2**-53: [S] int64, [S] int64 -> [S] fp64."""
    return _shift_right(random_bits(seed, position), 11).double() * 2.0**-53


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The log probabilities and ranks of `tokens`, and of the top tokens.

    Args:
        logits: [S, V] any float dtype, before temperature and filters.
        tokens: [S] integer ids.
        k: number of top tokens; 0 gives empty tensors, more than V gives V.

    Returns:
        token logprob [S] fp32; top ids [S, k] int64, likeliest first, lower id first among equals
        (so that the first one is the greedy token); top logprobs [S, k] fp32; rank [S] int64, 1 =
        no token has a higher logit than this one.
    """
    logits = logits.float()
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)  # [S, 1]
    chosen = logits.gather(1, tokens.long().unsqueeze(1))  # [S, 1]
    rank = (logits > chosen).sum(dim=-1, dtype=torch.int32).long() + 1
    top_ids = stable_top(logits, min(k, logits.shape[-1]))
    top = logits.gather(1, top_ids) - normaliser
    return (chosen - normaliser).squeeze(1), top_ids, top, rank
