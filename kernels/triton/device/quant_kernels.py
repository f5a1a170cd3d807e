"""Matrix products with weights of 4 and 8 bits, which are widened on their way to the tensor cores.

A word of 32 bits holds the eight or four codes of successive inputs of one output, the first in its
lowest bits. So a thread has successive inputs when it has widened a word, and stores them in shared
memory at once.
"""

import triton
import triton.language as tl

INTEGER = tl.constexpr(0)
E4M3 = tl.constexpr(1)
TABLE = tl.constexpr(2)

WIDE = tl.constexpr(0)
HALF = tl.constexpr(1)
BRAIN = tl.constexpr(2)

# The float 2^23 + i has the integer i in its lowest bits.
LARGE_BITS = tl.constexpr(0x4B000000)
LARGE = tl.constexpr(8388608.0)


@triton.jit
def numbers_of(codes, zero, table, KIND: tl.constexpr):
    """The numbers that codes stand for, less their zero points, in fp32 and exact.

    Those of E4M3 are 2^-120 of themselves: its bits are at the place of fp32's.
    """
    if KIND == TABLE:
        numbers = tl.load(table + codes)
    elif KIND == E4M3:
        moved = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
        numbers = moved.to(tl.float32, bitcast=True)
    else:
        numbers = (codes | LARGE_BITS).to(tl.float32, bitcast=True) - (LARGE + zero)
    return numbers


@triton.jit
def scale_of(group, FORM: tl.constexpr):
    """The scale in fp32, of a number in ``FORM``: fp32, or fp16 or bf16 in the lower half of 32."""
    if FORM == HALF:
        scale = (group & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORM == BRAIN:
        scale = (group << 16).to(tl.float32, bitcast=True)
    else:
        scale = group
    return scale


@triton.jit
def finish(
    summed,  # [ROWS, COLUMNS] fp32
    bias,
    out,
    m,  # [ROWS] int64
    n,  # [COLUMNS]
    written,
    factor,
    OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """out = y + b, or out += factor * (y + b)."""
    target = out + m[:, None] * OUTPUTS + n[None, :]
    if BIAS:
        summed += tl.load(bias + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    if ADD:
        summed = tl.load(target, mask=written, other=0.0).to(tl.float32) + summed * factor
    tl.store(target, summed.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["rows"])
def coded_product(
    x,  # [T, K]
    words,  # [N, W] int32
    groups,  # [G, N], rows GROUP_STRIDE apart: scales in fp32, or 16 bits and a zero point above
    zeros,  # [G, N] fp32, rows GROUP_STRIDE apart; any pointer without ZEROS
    table,  # [16] fp32, any pointer for other kinds
    bias,  # [N], any pointer without BIAS
    out,  # [T, N], written; with ADD the residual stream
    sums,  # [SPLIT, T, N] fp32, any pointer where SPLIT is 1
    arrived,  # [column blocks] int32, parts that are done; zeros before and after
    rows,  # T
    factor,  # on the added product
    INPUTS: tl.constexpr,  # K
    OUTPUTS: tl.constexpr,  # N
    ROW_WORDS: tl.constexpr,  # W
    DEPTH: tl.constexpr,  # inputs of a block
    SPANS: tl.constexpr,  # parts of a block, each within one group
    GROUP: tl.constexpr,  # inputs that share a scale
    GROUPS: tl.constexpr,  # G
    GROUP_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,  # of a code
    FORM: tl.constexpr,  # of groups
    MIDDLE: tl.constexpr,  # the zero point of scales in fp32 without ZEROS
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,  # programs that share the inputs of an output
):
    """y = x W^T + b, and out = y, or out += factor * y. Program (columns, part of inputs, rows).

    A weight is (number - zero) * scale, rounded once to the type of x. Sums are in fp32. Few column
    blocks are not enough programs, so parts of the inputs are summed apart. The program that
    finishes the last of them adds all, always in their order (`attend_tiles`).
    """
    EACH: tl.constexpr = 32 // BITS
    MASK: tl.constexpr = 15 if BITS == 4 else 255
    WORDS: tl.constexpr = DEPTH // EACH
    BLOCKS: tl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    PART_BLOCKS: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = (tl.program_id(2) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = tl.program_id(1) * PART_BLOCKS
    exists = n < OUTPUTS
    written = (m < rows)[:, None] & exists[None, :]
    k = tl.arange(0, DEPTH)
    word = tl.arange(0, WORDS)
    span = tl.arange(0, SPANS)
    shift = tl.arange(0, EACH) * BITS
    row_words = words + n[None, :].to(tl.int64) * ROW_WORDS + word[:, None]
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(first, tl.minimum(first + PART_BLOCKS, BLOCKS)):
        start = block * DEPTH
        inside = (m < rows)[:, None] & (start + k < INPUTS)[None, :]
        a = tl.load(x + m[:, None] * INPUTS + (start + k)[None, :], mask=inside, other=0.0)
        packed = tl.load(row_words + block * WORDS, mask=exists[None, :], other=0)
        group = (start + span * (DEPTH // SPANS)) // GROUP
        there = (group < GROUPS)[:, None] & exists[None, :]
        at = group[:, None] * GROUP_STRIDE + n[None, :]
        own = tl.load(groups + at, mask=there, other=0)[:, None, None, :]
        zero = tl.full([1, 1, 1, 1], MIDDLE, tl.float32)
        if ZEROS:
            zero = tl.load(zeros + at, mask=there, other=0.0)[:, None, None, :]
        elif FORM != WIDE:
            zero = (own >> 16).to(tl.float32)
        packed = tl.reshape(packed, [SPANS, WORDS // SPANS, 1, COLUMNS])
        codes = (packed >> shift[None, None, :, None]) & MASK
        weights = numbers_of(codes, zero, table, KIND) * scale_of(own, FORM)
        b = tl.reshape(weights.to(x.dtype.element_ty), [DEPTH, COLUMNS])
        summed = tl.dot(a, b, summed, input_precision="ieee")
    if SPLIT == 1:
        finish(summed, bias, out, m, n, written, factor, OUTPUTS, BIAS, ADD)
    else:
        place = m[:, None] * OUTPUTS + n[None, :]
        part = tl.program_id(1).to(tl.int64) * rows * OUTPUTS
        tl.store(sums + part + place, summed, mask=written)
        tl.debug_barrier()  # all threads have stored: the arrival releases what they wrote
        counter = arrived + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            whole = tl.zeros([ROWS, COLUMNS], tl.float32)
            for _ in tl.static_range(SPLIT):  # their reads do not wait for each other
                whole += tl.load(sums + place, mask=written, other=0.0, cache_modifier=".cg")
                place += rows.to(tl.int64) * OUTPUTS
            finish(whole, bias, out, m, n, written, factor, OUTPUTS, BIAS, ADD)
            tl.store(counter, 0)
