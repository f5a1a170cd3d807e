"""Matrix products with weights of 4 and 8 bits, which are widened on their way to the tensor cores.

`coded_columns` is the fast one, for rows of 16 bits. `coded_product` takes all others. There a word
of 32 bits holds the eight or four codes of successive inputs of one output, the first in its lowest
bits. So a thread has successive inputs when it has widened a word, and stores them in shared memory
at once. `widen_codes` makes the weight whole.
"""

import triton
import triton.language as tl

from rayfin.kernels.triton.device.layer_kernels import to_page

INTEGER = tl.constexpr(0)
E4M3 = tl.constexpr(1)
TABLE = tl.constexpr(2)
E2M1 = tl.constexpr(3)

WIDE = tl.constexpr(0)
HALF = tl.constexpr(1)
BRAIN = tl.constexpr(2)
EXPONENT = tl.constexpr(3)

# The float 2^23 + i has the integer i in its lowest bits.
LARGE_BITS = tl.constexpr(0x4B000000)
LARGE = tl.constexpr(8388608.0)

# PTX for two half words at once: the numbers of one part of their codes, see `exact`.
BF16_NIBBLES = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t, one; shr.b32 t, $1, {shift}; mov.b32 one, 0x3f803f80;"
        " lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $0, t, one, $2; }"
        for shift in (0, 4, 8, 12)
    )
)
FP16_NIBBLES = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t; shr.b32 t, $1, {shift};"
        " lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 $0, t, $2; }"
        for shift in (0, 4, 8, 12)
    )
)
# A number of e4m3 in the upper half of 16 bits becomes 2^-120 of itself in bf16, 2^-8 in fp16.
BF16_OCTETS = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t, s, up, zero; shl.b32 t, $1, {shift}; and.b32 s, t, 0x80008000;"
        " shr.b32 t, t, 4; lop3.b32 t, t, 0x07f007f0, s, 0xea; mov.b32 up, 0x7b807b80;"
        " mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, t, up, zero; }"
        for shift in (8, 0)
    )
)
FP16_OCTETS = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t, s, up; shl.b32 t, $1, {shift}; and.b32 s, t, 0x80008000;"
        " shr.b32 t, t, 1; lop3.b32 t, t, 0x3f803f80, s, 0xea; mov.b32 up, 0x5c005c00;"
        " mul.rn.f16x2 $0, t, up; }"
        for shift in (8, 0)
    )
)
# E2M1's three bits of magnitude become 2^-126 of the number in bf16, 2^-14 in fp16.
BF16_FLOATS = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t, s, up, zero; {sign}; and.b32 s, s, 0x80008000; {magnitude};"
        " lop3.b32 t, t, 0x01c001c0, s, 0xea; mov.b32 up, 0x7e807e80;"
        " mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, t, up, zero; }"
        for sign, magnitude in (
            ("shl.b32 s, $1, 12", "shl.b32 t, $1, 6"),
            ("shl.b32 s, $1, 8", "shl.b32 t, $1, 2"),
            ("shl.b32 s, $1, 4", "shr.b32 t, $1, 2"),
            ("mov.b32 s, $1", "shr.b32 t, $1, 6"),
        )
    )
)
FP16_FLOATS = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t, s, up; {sign}; and.b32 s, s, 0x80008000; {magnitude};"
        " lop3.b32 t, t, 0x0e000e00, s, 0xea; mov.b32 up, 0x74007400;"
        " mul.rn.f16x2 $0, t, up; }"
        for sign, magnitude in (
            ("shl.b32 s, $1, 12", "shl.b32 t, $1, 9"),
            ("shl.b32 s, $1, 8", "shl.b32 t, $1, 5"),
            ("shl.b32 s, $1, 4", "shl.b32 t, $1, 1"),
            ("mov.b32 s, $1", "shr.b32 t, $1, 3"),
        )
    )
)

# Numbers of a tile whose parts a thread has room to read all at once.
UNROLLED = tl.constexpr(4096)

E4M3_PART = tl.constexpr(2.0**-120)
"""What is left on sums of e4m3, whose scales are for numbers of 2^-120 (`numbers_of`)."""

E2M1_FACTOR = tl.constexpr(2.0**126)
"""On the bits of E2M1 at the place of fp32's."""

LEAST_EXPONENT = tl.constexpr(0x400000)
"""The fp32 2^-127, for which e8m0 has a 0."""


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
    elif KIND == E2M1:
        moved = ((codes & 8) << 28) | ((codes & 7) << 22)
        numbers = moved.to(tl.float32, bitcast=True) * E2M1_FACTOR
    else:
        numbers = (codes | LARGE_BITS).to(tl.float32, bitcast=True) - (LARGE + zero)
    return numbers


@triton.jit
def scale_of(group, FORM: tl.constexpr):
    """The scale in fp32, of a number in ``FORM``.

    It is fp32, or fp16 or bf16 in the lower half of 32 bits, or an exponent in 8 (e8m0).
    """
    if FORM == HALF:
        scale = (group & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORM == BRAIN:
        scale = (group << 16).to(tl.float32, bitcast=True)
    elif FORM == EXPONENT:
        bits = tl.maximum(group.to(tl.int32) << 23, LEAST_EXPONENT)
        scale = bits.to(tl.float32, bitcast=True)
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


@triton.jit
def join(
    summed,  # [ROWS, COLUMNS] fp32, of this program's inputs
    bias,
    out,
    sums,  # [SPLIT, T, N] fp32
    arrived,
    rows,
    m,
    n,
    written,
    factor,
    OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The last program of an output finishes the sum of all parts, always in their order."""
    place = m[:, None] * OUTPUTS + n[None, :]
    part = tl.program_id(1).to(tl.int64) * rows * OUTPUTS
    tl.store(sums + part + place, summed, mask=written)
    tl.debug_barrier()  # all threads have stored: the arrival releases what they wrote
    counter = arrived + tl.program_id(0)
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
        whole = tl.zeros_like(summed)
        if summed.numel <= UNROLLED:
            for _ in tl.static_range(SPLIT):  # their reads do not wait for each other
                whole += tl.load(sums + place, mask=written, other=0.0, cache_modifier=".cg")
                place += rows.to(tl.int64) * OUTPUTS
        else:
            for _ in range(SPLIT):
                whole += tl.load(sums + place, mask=written, other=0.0, cache_modifier=".cg")
                place += rows.to(tl.int64) * OUTPUTS
        finish(whole, bias, out, m, n, written, factor, OUTPUTS, BIAS, ADD)
        tl.store(counter, 0)


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
        scales = tl.load(groups + at, mask=there, other=0)[:, None, None, :]
        zero = tl.full([1, 1, 1, 1], MIDDLE, tl.float32)
        if ZEROS:
            zero = tl.load(zeros + at, mask=there, other=0.0)[:, None, None, :]
        elif FORM != WIDE:
            zero = (scales >> 16).to(tl.float32)
        packed = tl.reshape(packed, [SPANS, WORDS // SPANS, 1, COLUMNS])
        codes = (packed >> shift[None, None, :, None]) & MASK
        weights = numbers_of(codes, zero, table, KIND) * scale_of(scales, FORM)
        b = tl.reshape(weights.to(x.dtype.element_ty), [DEPTH, COLUMNS])
        summed = tl.dot(a, b, summed, input_precision="ieee")
    if SPLIT == 1:
        finish(summed, bias, out, m, n, written, factor, OUTPUTS, BIAS, ADD)
    else:
        join(
            summed, bias, out, sums, arrived, rows, m, n, written, factor, OUTPUTS, BIAS, ADD, SPLIT
        )


@triton.jit
def exact(
    packed,  # int16
    PLACE: tl.constexpr,  # of a code in the half words
    zero,  # [.., 1] fp32
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    dtype: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The numbers of one code of each half word, less their zero points, exact in 16 bits.

    128 + i in bf16, and 1024 + i in fp16, have the integer i in their lowest bits. Nothing but
    elementwise operations lies between the load of codes and the product, so that the compiler
    loads them in the order in which tensor cores take them. With ``PAIRS`` a few instructions make
    two numbers; Triton makes them one by one.
    """
    BRAIN_FLOAT: tl.constexpr = dtype == tl.bfloat16
    BASE: tl.constexpr = 128.0 if BRAIN_FLOAT else 1024.0
    if KIND == INTEGER and BITS == 4:
        minus = (-(zero + BASE)).to(dtype)
        if PAIRS and BRAIN_FLOAT:
            numbers = tl.inline_asm_elementwise(
                BF16_NIBBLES[PLACE], "=r,r,r", [packed, minus], tl.bfloat16, True, pack=2
            )
        elif PAIRS:
            numbers = tl.inline_asm_elementwise(
                FP16_NIBBLES[PLACE], "=r,r,r", [packed, minus], tl.float16, True, pack=2
            )
        else:
            code = ((packed >> (4 * PLACE)) & 15).to(tl.int16)
            ONE: tl.constexpr = 0x4300 if BRAIN_FLOAT else 0x6400
            numbers = (code | ONE).to(dtype, bitcast=True) + minus
    elif KIND == E2M1 and PAIRS:
        if BRAIN_FLOAT:
            numbers = tl.inline_asm_elementwise(
                BF16_FLOATS[PLACE], "=r,r", [packed], tl.bfloat16, True, pack=2
            )
        else:
            numbers = tl.inline_asm_elementwise(
                FP16_FLOATS[PLACE], "=r,r", [packed], tl.float16, True, pack=2
            )
    elif KIND == E4M3 and PAIRS:
        if BRAIN_FLOAT:
            numbers = tl.inline_asm_elementwise(
                BF16_OCTETS[PLACE], "=r,r", [packed], tl.bfloat16, True, pack=2
            )
        else:
            numbers = tl.inline_asm_elementwise(
                FP16_OCTETS[PLACE], "=r,r", [packed], tl.float16, True, pack=2
            )
    else:
        codes = (packed.to(tl.int32) >> (BITS * PLACE)) & (15 if BITS == 4 else 255)
        numbers = numbers_of(codes, zero, packed, KIND)
        if KIND == E4M3:
            numbers *= 1.0 / E4M3_PART
        numbers = numbers.to(dtype)
    return numbers


@triton.jit
def zero_of(group, zeros, at, there, FORM: tl.constexpr, MIDDLE: tl.constexpr, ZEROS: tl.constexpr):
    """Zero points of the loaded ``group`` at offsets, in fp32."""
    if ZEROS:
        zero = tl.load(zeros + at, mask=there, other=0.0)
    elif FORM == HALF or FORM == BRAIN:
        zero = ((group >> 16) | LARGE_BITS).to(tl.float32, bitcast=True) - LARGE
    else:
        zero = tl.full(group.shape, MIDDLE, tl.float32)
    return zero


@triton.jit
def add_block(
    summed,  # [COLUMNS, ROWS] fp32
    packed,  # [COLUMNS, PART] int16, the codes of the block
    rows,  # [ROWS, PART] pointers to the first inputs of the rows
    there,  # [ROWS, 1], rows that exist
    groups,  # as for `coded_columns`
    zeros,
    n,  # [COLUMNS] outputs
    exists,  # [COLUMNS]
    start,  # the block's first input
    INPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The sums with a block of inputs: numbers are exact, and scales multiply their sums."""
    EACH: tl.constexpr = 16 // BITS
    PART: tl.constexpr = DEPTH // EACH
    dtype: tl.constexpr = rows.dtype.element_ty
    k = tl.arange(0, PART)
    for span in tl.static_range(SPANS):
        group = (start + span * (DEPTH // SPANS)) // GROUP
        at, known = group * GROUP_STRIDE + n, exists & (group < GROUPS)
        scales = tl.load(groups + at, mask=known, other=0)
        zero = zero_of(scales, zeros, at, known, FORM, MIDDLE, ZEROS)[:, None]
        part = tl.zeros(summed.shape, tl.float32)
        for i in tl.static_range(EACH // SPANS):
            place = span * (EACH // SPANS) + i
            inside = there
            if INPUTS % DEPTH != 0:
                inside = there & (start + place * PART + k < INPUTS)[None, :]
            a = tl.load(rows + start + place * PART, mask=inside, other=0.0)
            # Not ``place``, which Triton takes for a tensor.
            number = exact(packed, span * (EACH // SPANS) + i, zero, KIND, BITS, dtype, PAIRS)
            part = tl.dot(number, tl.trans(a), part)
        scale = scale_of(scales, FORM)
        if KIND == E4M3:
            scale *= E4M3_PART
        summed += part * scale[:, None]
    return summed


@triton.jit(do_not_specialize=["rows"])
def coded_columns(
    x,  # [T, K] of 16 bits
    codes,  # [N, C] int16: two or four codes each, a half or a quarter of a block apart
    groups,  # as are those that follow, see `coded_product`
    zeros,
    bias,
    out,
    sums,
    arrived,
    rows,  # T
    factor,
    INPUTS: tl.constexpr,  # K
    OUTPUTS: tl.constexpr,  # N
    ROW_CODES: tl.constexpr,  # C
    DEPTH: tl.constexpr,  # inputs of a block
    SPANS: tl.constexpr,  # parts of a block, each within one group
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,  # see `exact`
):
    """`coded_product` with weights on the tensor cores' left side: (W x^T)^T.

    There Hopper's take them from registers, so that codes become numbers between shared memory
    and the tensor cores, and nothing is stored on the way. The numbers are exact, and scales
    multiply the sums of their inputs in fp32: weights are not rounded.
    """
    PART: tl.constexpr = DEPTH // (16 // BITS)
    BLOCKS: tl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    PART_BLOCKS: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = (tl.program_id(2) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = tl.program_id(1) * PART_BLOCKS
    exists = n < OUTPUTS
    there = (m < rows)[:, None]
    k = tl.arange(0, PART)
    row_codes = codes + n[:, None].to(tl.int64) * ROW_CODES + k[None, :]
    own_rows = x + m[:, None] * INPUTS + k[None, :]
    summed = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(first, tl.minimum(first + PART_BLOCKS, BLOCKS), num_stages=STAGES):
        start = block * DEPTH
        packed = tl.load(row_codes + block * PART, mask=exists[:, None], other=0)
        summed = add_block(
            summed,
            packed,
            own_rows,
            there,
            groups,
            zeros,
            n,
            exists,
            start,
            INPUTS,
            DEPTH,
            SPANS,
            GROUP,
            GROUPS,
            GROUP_STRIDE,
            KIND,
            BITS,
            FORM,
            MIDDLE,
            ZEROS,
            PAIRS,
        )
    y = tl.trans(summed)
    written = there & exists[None, :]
    if SPLIT == 1:
        finish(y, bias, out, m, n, written, factor, OUTPUTS, BIAS, ADD)
    else:
        join(y, bias, out, sums, arrived, rows, m, n, written, factor, OUTPUTS, BIAS, ADD, SPLIT)


@triton.jit
def widen_codes(
    codes,  # [N, C]: int16 in the order of `coded_columns`, or int32 in that of `coded_product`
    groups,  # as for `coded_product`, as are those that follow
    zeros,
    table,
    out,  # [N, K], written
    INPUTS: tl.constexpr,  # K
    OUTPUTS: tl.constexpr,  # N
    ROW_CODES: tl.constexpr,  # C
    PART: tl.constexpr,  # inputs between the codes of an int16; 1: successive codes of an int32
    GROUP: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The weights, each rounded once to the type of ``out``. Program (outputs, codes)."""
    EACH: tl.constexpr = 32 // BITS if PART == 1 else 16 // BITS
    MASK: tl.constexpr = 15 if BITS == 4 else 255
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    place = tl.program_id(1) * COUNT + tl.arange(0, COUNT)[None, :]
    known = (n < OUTPUTS) & (place < ROW_CODES)
    row = n.to(tl.int64)
    packed = tl.load(codes + row * ROW_CODES + place, mask=known, other=0).to(tl.int32)
    for i in tl.static_range(EACH):
        k = place // PART * (EACH * PART) + i * PART + place % PART
        at, inside = k // GROUP * GROUP_STRIDE + n, known & (k < INPUTS)
        scales = tl.load(groups + at, mask=inside, other=0)
        zero = zero_of(scales, zeros, at, inside, FORM, MIDDLE, ZEROS)
        numbers = numbers_of((packed >> (i * BITS)) & MASK, zero, table, KIND)
        weights = numbers * scale_of(scales, FORM)
        tl.store(out + row * INPUTS + k, weights.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "padded_rows"])
def round_rows(
    x,  # [T, K]
    out,  # [R, BLOCKS * DEPTH] e4m3, written
    scales,  # [BLOCKS or 1, R] fp32, written
    rows,  # T
    padded_rows,  # R
    INPUTS: tl.constexpr,  # K
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two of blocks
    DEPTH: tl.constexpr,  # inputs of a block
    BY_BLOCK: tl.constexpr,  # each block of a row has a scale; else each row
):
    """Divides rows by a scale that makes their largest number 448. Program (row).

    A scale is NaN where a number is. Inputs of a block are in the order of `coded_columns`: two by
    two, half a block apart.
    """
    row = tl.program_id(0)
    block, place = tl.arange(0, WIDTH)[:, None], tl.arange(0, DEPTH)[None, :]
    k = block * DEPTH + place % 2 * (DEPTH // 2) + place // 2
    known = (k < INPUTS) & (row < rows)
    numbers = tl.load(x + row.to(tl.int64) * INPUTS + k, mask=known, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(numbers), axis=1)
    spoiled = tl.max((numbers != numbers).to(tl.int32), axis=1)
    if not BY_BLOCK:
        largest = tl.zeros_like(largest) + tl.max(largest, axis=0)
        spoiled = tl.zeros_like(spoiled) + tl.max(spoiled, axis=0)
    largest = tl.maximum(largest, 1e-30)
    target = out + row.to(tl.int64) * (BLOCKS * DEPTH) + block * DEPTH + place
    factor = tl.div_rn(tl.full(largest.shape, 448.0, tl.float32), largest)
    rounded = to_page(numbers * factor[:, None], out)
    tl.store(target, rounded, mask=(block < BLOCKS) & (place < DEPTH))
    each = tl.arange(0, WIDTH)
    stored = each < (BLOCKS if BY_BLOCK else 1)
    scale = tl.where(spoiled > 0, float("nan"), largest / 448.0)
    tl.store(scales + each.to(tl.int64) * padded_rows + row, scale, mask=stored)
