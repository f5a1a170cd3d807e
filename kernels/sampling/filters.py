"""Filters on logits: each returns a copy with -inf for tokens that may not be sampled.

They run in vLLM's order, min_p, top_k, top_p, after the temperature. Each sees the renormalized
distribution that the previous one left.
"""

from dataclasses import dataclass

import torch

from rayfin.kernels.shapes import TokenBits

NEVER = float("-inf")
NUCLEUS_GUESS = 1024  # logits that a CPU sorts first; it sorts all only if these are too few


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """[S, V] any float, [S] fp32 -> [S, V] fp32 with a maximum of 0. Temperature 0 divides by 1.

    Shifting first keeps the quotient from overflowing at tiny temperatures.
    """
    logits = logits.float()
    divisor = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    return (logits - logits.amax(dim=-1, keepdim=True)) / divisor


def min_p_filter(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keeps tokens at least min_p times as likely as the likeliest (Nguyen et al., 2024).

    [S, V] fp32, [S] fp32 (0 = off) -> [S, V].
    """
    floor = logits.amax(dim=-1, keepdim=True) + torch.log(min_p).unsqueeze(1)
    return logits.masked_fill(logits < floor, NEVER)


def top_k_filter(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keeps tokens whose logit is no lower than the k-th highest; ties stay, as in vLLM.

    [S, V] fp32, [S] int64 (0 = off) -> [S, V].
    """
    vocabulary = logits.shape[-1]
    off = (top_k <= 0) | (top_k >= vocabulary)
    depth = torch.where(off, 1, top_k)
    # Reading a tensor's value is free on a CPU only; elsewhere it would stall the device.
    deepest = int(depth.max()) if logits.device.type == "cpu" else vocabulary
    highest = torch.topk(logits, deepest, dim=-1, sorted=True).values  # [S, deepest]
    floor = highest.gather(1, (depth - 1).unsqueeze(1))  # [S, 1]
    return logits.masked_fill((logits < floor) & ~off.unsqueeze(1), NEVER)


def top_p_filter(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the smallest set of likeliest tokens with mass >= top_p (Holtzman et al., 2020).

    Among equal logits the lower index comes first; the likeliest token always stays.
    [S, V] fp32, [S] fp32 (1 = off) -> [S, V].
    """
    vocabulary = logits.shape[-1]
    mass_of_all = fixed_point_weights(logits).sum(dim=-1, keepdim=True)  # [S, 1] int64, exact
    needed = mass_of_all.double() * top_p.double().unsqueeze(1)  # [S, 1]
    off = (top_p >= 1).unsqueeze(1)
    depth = min(NUCLEUS_GUESS, vocabulary) if logits.device.type == "cpu" else vocabulary
    highest, kept = _nucleus(logits, needed, depth)
    if depth < vocabulary and not bool((~kept[:, -1:] | off).all()):
        highest, kept = _nucleus(logits, needed, vocabulary)
    count = kept.sum(dim=-1, keepdim=True).clamp(min=1)  # [S, 1] tokens to keep
    floor = highest.gather(1, count - 1)  # [S, 1] the last one's logit
    above = (highest > floor).sum(dim=-1, keepdim=True)
    equal = logits == floor
    first_equals = equal & (equal.cumsum(dim=-1) <= count - above)
    return logits.masked_fill(~((logits > floor) | first_equals | off), NEVER)


def _nucleus(
    logits: torch.Tensor, needed: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `depth` highest logits, and which of them are needed to reach the mass.

    [S, V] fp32, [S, 1] fp64 -> [S, depth] fp32 highest first, [S, depth] bool. All True may mean
    that more would be needed.
    """
    if depth < logits.shape[-1]:
        highest = torch.topk(logits, depth, dim=-1, sorted=True).values
    else:
        highest = torch.sort(logits, dim=-1, descending=True).values
    weights = fixed_point_weights(highest)
    before = weights.cumsum(dim=-1) - weights
    return highest, before < needed


# Bans, allowed tokens and bias for a few rows. The functions change fp32 logits [S, V] in place and
# take pairs of a row [N] int64 and a token [N] int64.


def forbid(logits: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> None:
    """Bans the tokens."""
    logits[row, token] = NEVER


def allow_only(
    logits: torch.Tensor, rows: torch.Tensor, row: torch.Tensor, token: torch.Tensor
) -> None:
    """Bans all tokens in ``rows`` [M] int64 but those of the pairs, which are of these rows."""
    kept = logits[row, token]
    logits[rows] = NEVER
    logits[row, token] = kept


def allow_bits(logits: torch.Tensor, allowed: TokenBits) -> torch.Tensor:
    """A copy of logits [S, V] with -inf for the tokens that a row may not sample."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = (allowed.words.unsqueeze(-1) >> shifts) & 1  # [N, W, 32]
    never = bits.flatten(1)[:, : logits.shape[1]] == 0
    changed = logits.clone()
    changed[allowed.rows] = logits[allowed.rows].masked_fill(never, NEVER)
    return changed


def add_bias(
    logits: torch.Tensor, row: torch.Tensor, token: torch.Tensor, bias: torch.Tensor
) -> None:
    """Adds ``bias`` [N] fp32; pairs have to be unique."""
    logits[row, token] += bias


# Probabilities as integers, and an exact order of logits.
#
# A sum of floats depends on the order of additions, and so on the batch shape and the device. Token
# weights are therefore 40-bit fixed point integers: their sums are exact in any order, so a row's
# token does not depend on the other rows, and a cumulative sum never decreases. Tokens less than
# 2**-40 times as likely as the likeliest one have weight zero.

WEIGHT_BITS = 40  # 2**40 * vocabulary size must stay below 2**63: any vocabulary up to 2**22


def fixed_point_weights(logits: torch.Tensor) -> torch.Tensor:
    """Unnormalised softmax: [S, V] fp32 -> [S, V] int64 in 0 .. 2**WEIGHT_BITS, the maximum's."""
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_()
    return weights.mul_(float(1 << WEIGHT_BITS)).long()  # a power of two: exact in fp32


def sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """[S, V] fp32 -> [S, V] int64, unique, in the order "higher logit, then lower index"."""
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0: -0.0 and 0.0 are a tie
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # IEEE 754 floats sort as integers
    index = torch.arange(logits.shape[-1], device=logits.device)
    return (ordered << 32) | (0xFFFFFFFF - index)


def stable_top(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` highest logits, highest first, lower index first among equals.

    [S, V] fp32 -> [S, count] int64. `torch.topk` does not define the order of ties.
    """
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    return torch.topk(sort_keys(logits), count, dim=-1, sorted=True).indices


# Penalties on tokens that a request has already used, as vLLM and the OpenAI API define them.


@dataclass(frozen=True, slots=True, eq=False)
class UsedTokens:
    """N pairs of a row and a token that its request has used, no pair twice, on one device.

    As many as the requests have different tokens: a table over the vocabulary would have to be
    read and written as a whole at every step.
    """

    row: torch.Tensor  # [N] int64
    token: torch.Tensor  # [N] int64
    count: torch.Tensor  # [N] int64, how often it was generated; 0 for a token of the prompt alone
    repetition: torch.Tensor  # [N] fp32, of the row; 1 is off
    presence: torch.Tensor  # [N] fp32, of the row; 0 is off
    frequency: torch.Tensor  # [N] fp32, of the row; 0 is off


def apply_penalties(logits: torch.Tensor, used: UsedTokens) -> None:
    """Lower (or with negative penalties raise) the logits of used tokens, in place: [S, V] fp32.

    Repetition divides positive logits and multiplies negative ones (Keskar et al., 2019, "CTRL").
    Presence is subtracted once from a generated token, frequency once for each time.
    """
    values = logits[used.row, used.token]
    repeated = torch.where(values > 0, values / used.repetition, values * used.repetition)
    once = used.presence * (used.count > 0)
    logits[used.row, used.token] = repeated - used.frequency * used.count - once
