"""Log probabilities without a sort: the top tokens of each block, then the top tokens of those.

The vocabulary is read once, with one program per block. A program stores its block's top tokens,
its part of the softmax's sum, and the number of its tokens that are likelier than the sampled one.
"""

import triton
import triton.language as tl

from rayfin.kernels.triton.device.sample_kernels import LOW_BITS, NO_KEY, key_of, value_of


@triton.jit
def summarise_blocks(
    logits,  # [S, V] any float
    tokens,  # [S] int64
    num_logprobs,  # [S] int32, number of top tokens; negative = the row is skipped
    keys,  # [S, BLOCKS, MAX_TOP] int64, written: `num_logprobs` of each block, likeliest first
    highest,  # [S, BLOCKS] fp32, written
    total,  # [S, BLOCKS] fp32, written: sum of exp(logit - highest)
    above,  # [S, BLOCKS] int32, written: tokens with a higher logit than the row's
    stride,
    vocabulary,
    blocks,
    MAX_TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block). A key sorts by higher logit, then lower index (`sort_keys`)."""
    row = tl.program_id(0).to(tl.int64)
    num_top = tl.load(num_logprobs + row)
    if num_top >= 0:
        start = logits + row * stride
        index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = index < vocabulary
        x = tl.load(start + index, mask=inside, other=float("-inf")).to(tl.float32)
        token = tl.maximum(tl.load(tokens + row), 0)
        chosen = tl.load(start + token).to(tl.float32)
        block_highest = tl.max(x)
        shift = tl.where(block_highest == float("-inf"), 0.0, block_highest)
        place = row * blocks + tl.program_id(1)
        tl.store(highest + place, block_highest)
        tl.store(total + place, tl.sum(tl.exp(x - shift)))
        tl.store(above + place, tl.sum((inside & (x > chosen)).to(tl.int32)))
        key = tl.where(inside, key_of(x, index), NO_KEY)
        for i in range(0, num_top):
            best = tl.max(key)
            tl.store(keys + place * MAX_TOP + i, best)
            key = tl.where(key == best, NO_KEY, key)


@triton.jit
def merge_blocks(
    logits,  # [S, V] any float
    tokens,  # [S] int64
    num_logprobs,  # [S] int32
    keys,  # [S, BLOCKS, MAX_TOP] int64
    highest,  # [S, BLOCKS] fp32
    total,  # [S, BLOCKS] fp32
    above,  # [S, BLOCKS] int32
    values,  # [S, 1 + MAX_TOP] fp32, written: of the token itself, then of the likeliest
    numbers,  # [S, 1 + MAX_TOP] int32, written: the token's rank, then the likeliest tokens
    stride,
    blocks,
    MAX_TOP: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks up to a power of two
    CANDIDATES: tl.constexpr,  # blocks * MAX_TOP up to a power of two
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    num_top = tl.load(num_logprobs + row)
    if num_top >= 0:
        block = tl.arange(0, BLOCKS)
        known = block < blocks
        place = row * blocks + block
        block_highest = tl.load(highest + place, mask=known, other=float("-inf"))
        sums = tl.load(total + place, mask=known, other=0.0)
        top = tl.max(block_highest)
        normaliser = top + tl.log(tl.sum(sums * tl.exp(block_highest - top)))
        token = tl.maximum(tl.load(tokens + row), 0)
        chosen = tl.load(logits + row * stride + token).to(tl.float32)
        target = row * (1 + MAX_TOP)
        tl.store(values + target, chosen - normaliser)
        rank = tl.sum(tl.load(above + place, mask=known, other=0)) + 1
        tl.store(numbers + target, rank)
        candidate = tl.arange(0, CANDIDATES)
        exists = (candidate < blocks * MAX_TOP) & (candidate % MAX_TOP < num_top)
        key = tl.load(keys + row * blocks * MAX_TOP + candidate, mask=exists, other=NO_KEY)
        for i in range(0, num_top):
            best = tl.max(key)
            value = value_of((best >> 32).to(tl.int32))
            tl.store(values + target + 1 + i, value - normaliser)
            tl.store(numbers + target + 1 + i, ((best & LOW_BITS) ^ LOW_BITS).to(tl.int32))
            key = tl.where(key == best, NO_KEY, key)
