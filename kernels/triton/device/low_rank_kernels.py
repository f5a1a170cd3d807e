"""What adapters of low rank add to a product: each row has its own, by a number in a table.

Two kernels for any number of rows and adapters, as in Punica (Chen et al., 2023). Rows
of the base model end at once.
"""

import triton
import triton.language as tl


@triton.jit
def shrink(
    x,  # [T, K]
    a,  # [S, RANKS, K]
    rows,  # [T] int64, the table's entry, negative = none
    h,  # [T, RANKS] fp32, written
    x_stride,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # ranks of a program
    BLOCK: tl.constexpr,
):
    """h = A x. Program (token, some ranks)."""
    token = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + token)
    if entry >= 0:
        rank = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
        known = rank < RANKS
        weights = a + (entry * RANKS + rank[:, None]) * K
        sums = tl.zeros((AT_ONCE, BLOCK), tl.float32)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            inside = k < K
            value = tl.load(x + token * x_stride + k, mask=inside, other=0.0).to(tl.float32)
            mask = known[:, None] & inside[None, :]
            weight = tl.load(weights + k[None, :], mask=mask, other=0.0).to(tl.float32)
            sums += weight * value[None, :]
        tl.store(h + token * RANKS + rank, tl.sum(sums, 1), mask=known)


@triton.jit
def expand(
    h,  # [T, PARTS * RANK] fp32
    b,  # [S, N, RANK]
    scales,  # [S, PARTS] fp32
    rows,  # [T] int64, the table's entry, negative = none
    out,  # [T, N], added to in place
    N: tl.constexpr,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,  # outputs where the first and the second of up to three parts end
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,  # RANK up to a power of two
    BLOCK: tl.constexpr,
):
    """out += scale * B h, each part of the outputs with its own ranks. Program (token, outputs)."""
    token = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + token)
    if entry >= 0:
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = n < N
        part = (n >= FIRST_END).to(tl.int32) + (n >= SECOND_END).to(tl.int32)
        rank = tl.arange(0, WIDTH)
        known = inside[:, None] & (rank < RANK)[None, :]
        weights = b + (entry * N + n[:, None]) * RANK + rank[None, :]
        weight = tl.load(weights, mask=known, other=0.0).to(tl.float32)
        source = h + token * PARTS * RANK + part[:, None] * RANK + rank[None, :]
        value = tl.load(source, mask=known, other=0.0)
        scale = tl.load(scales + entry * PARTS + part, mask=inside, other=0.0)
        added = tl.sum(weight * value, 1) * scale
        old = tl.load(out + token * N + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * N + n, (old + added).to(out.dtype.element_ty), mask=inside)
