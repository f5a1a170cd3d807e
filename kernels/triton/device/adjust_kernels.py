"""Penalties, biases and bans on logits, from short lists of tokens on the device.

Each row has a list of its used tokens with their counts and of its banned, allowed and biased
tokens. Only their logits change. The host sends nothing of the vocabulary's size, and sampled
tokens are counted on the device.
"""

import triton
import triton.language as tl

from rayfin.kernels import shapes as rules

USED = tl.constexpr(rules.USED)
ALLOWED = tl.constexpr(rules.ALLOWED)
BANNED = tl.constexpr(rules.BANNED)
BANNED_EARLY = tl.constexpr(rules.BANNED_EARLY)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def copy_rows(
    logits,  # [S, V] any float
    restricted,  # [S] int32, 1 = only the list's allowed tokens may be sampled
    out,  # [S, V] fp32, written
    stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """Program (row, block). Of a restricted row only NaN and inf are copied, to be detected."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocabulary
    x = tl.load(logits + row * stride + index, mask=inside, other=0.0).to(tl.float32)
    hidden = (tl.load(restricted + row) > 0) & (x < INFINITY)
    tl.store(out + row * vocabulary + index, tl.where(hidden, -INFINITY, x), mask=inside)


@triton.jit
def adjust_rows(
    logits,  # [S, V] any float
    out,  # [S, V] fp32, the tokens of the lists are written
    positions,  # [S] int64, of the tokens about to be sampled
    first,  # [S] int32, where a row's list begins
    length,  # [S] int32
    restricted,  # [S] int32
    banned_until,  # [S] int64
    repetition,  # [S] fp32
    presence,  # [S] fp32
    frequency,  # [S] fp32
    tokens,  # [E] int32, no token twice in a row's list
    counts,  # [E] int32, how often it was generated
    kinds,  # [E] int32
    biases,  # [E] fp32
    stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """vLLM's order: allowed tokens, bans, bias, penalties. Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    amount = tl.load(length + row)
    if amount > 0:
        start = tl.load(first + row)
        early = tl.load(positions + row) < tl.load(banned_until + row)
        only_allowed = tl.load(restricted + row) > 0
        repeated = tl.load(repetition + row)
        once = tl.load(presence + row)
        each = tl.load(frequency + row)
        for at in range(0, amount, BLOCK):
            entry = start + at + tl.arange(0, BLOCK)
            inside = at + tl.arange(0, BLOCK) < amount
            token = tl.load(tokens + entry, mask=inside, other=0)
            count = tl.load(counts + entry, mask=inside, other=0)
            kind = tl.load(kinds + entry, mask=inside, other=0)
            x = tl.load(logits + row * stride + token, mask=inside, other=0.0).to(tl.float32)
            never = ((kind & BANNED) > 0) | (((kind & BANNED_EARLY) > 0) & early)
            never = never | (((kind & ALLOWED) == 0) & only_allowed)
            x = tl.where(never & (x < INFINITY), -INFINITY, x)
            x += tl.load(biases + entry, mask=inside, other=0.0)
            lowered = tl.where(x > 0, tl.div_rn(x, repeated + tl.zeros_like(x)), x * repeated)
            lowered = lowered - each * count - tl.where(count > 0, once, 0.0)
            x = tl.where((kind & USED) > 0, lowered, x)
            tl.store(out + row * vocabulary + token, x, mask=inside)


@triton.jit
def count_rows(
    sampled,  # [S] int64, negative = none
    remaining,  # [S] int32, a row without remaining steps is not counted
    counted,  # [S] int32, 1 = the row's tokens are counted
    first,  # [S] int32
    length,  # [S] int32, written: a token that is new is put behind the others
    tokens,  # [E] int32, written
    counts,  # [E] int32, written
    kinds,  # [E] int32, written
    biases,  # [E] fp32, written
    BLOCK: tl.constexpr,
):
    """Program (row), of one warp: no other warp may change a length in between."""
    row = tl.program_id(0)
    token = tl.load(sampled + row).to(tl.int32)
    if (tl.load(counted + row) > 0) & (tl.load(remaining + row) > 0) & (token >= 0):
        start = tl.load(first + row)
        amount = tl.load(length + row)
        place = tl.full([], -1, tl.int32)
        for at in range(0, amount, BLOCK):
            index = at + tl.arange(0, BLOCK)
            known = tl.load(tokens + start + index, mask=index < amount, other=-1)
            place = tl.maximum(place, tl.max(tl.where(known == token, index, -1)))
        if place >= 0:
            tl.store(counts + start + place, tl.load(counts + start + place) + 1)
            tl.store(kinds + start + place, tl.load(kinds + start + place) | USED)
        else:
            tl.store(tokens + start + amount, token)
            tl.store(counts + start + amount, 1)
            tl.store(kinds + start + amount, USED)
            tl.store(biases + start + amount, 0.0)
            tl.store(length + row, amount + 1)
