"""A mixture of experts as two grouped matrix products: rows are sorted by expert on the device."""

import triton
import triton.language as tl

from rayfin.kernels.triton.device.activation import gated
from rayfin.kernels.triton.device.quant_kernels import add_block


@triton.jit
def experts_of(
    chosen,  # [A] int64, the expert of each assignment; ids that do not exist are ignored
    slots,  # [T] int64, negative in rows to ignore; any pointer without MASKED
    assignment,
    end,
    CHOICES: tl.constexpr,  # assignments of a row
    MASKED: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """The experts int32 of assignments below ``end``; EXPERTS of the others, and where ignored."""
    known = assignment < end
    expert = tl.load(chosen + assignment, mask=known, other=EXPERTS)
    exists = (expert >= 0) & (expert < EXPERTS)
    if MASKED:
        exists &= tl.load(slots + assignment // CHOICES, mask=known, other=-1) >= 0
    return tl.where(exists, expert, EXPERTS).to(tl.int32)


@triton.jit(do_not_specialize=["assignments"])
def count_assignments(
    chosen,  # [A] int64, as are slots, for `experts_of`
    slots,
    counts,  # [shares, BINS] int32, written
    assignments,
    CHOICES: tl.constexpr,
    MASKED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # a power of two over EXPERTS
    SHARE: tl.constexpr,
):
    """Program (share of the assignments): how many each expert has."""
    share = tl.program_id(0)
    i = share * SHARE + tl.arange(0, SHARE)
    expert = experts_of(chosen, slots, i, assignments, CHOICES, MASKED, EXPERTS)
    tl.store(counts + share * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["assignments", "max_tiles"])
def map_tiles(
    chosen,  # [A] int64, as are slots, for `experts_of`
    slots,
    counts,  # [shares, BINS] int32; any pointer without COUNTED
    order,  # [A] int32, written: assignments, stably sorted by expert
    tiles,  # [N, 3] int32, written: expert (-1: none), first place in ``order``, assignments
    assignments,
    max_tiles,
    CHOICES: tl.constexpr,
    MASKED: tl.constexpr,
    COUNTED: tl.constexpr,  # else each program reads all assignments, which are few
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    SHARE: tl.constexpr,  # assignments of a program
    BLOCK: tl.constexpr,  # assignments counted at once
    SORTED: tl.constexpr,  # assignments sorted at once
    AT_ONCE: tl.constexpr,  # tiles, or other programs' counts
):
    """Program (share of the assignments): sorts them by expert, and writes some of the tiles.

    As vLLM's ``moe_align_block_size``, but without atomics, so that the order is always the same.
    """
    share, shares = tl.program_id(0), tl.num_programs(0)
    bins, some = tl.arange(0, BINS), tl.arange(0, AT_ONCE)
    counted = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)  # of the shares before this one
    if COUNTED:
        for start in range(0, shares, AT_ONCE):
            other = (start + some)[:, None]
            read = tl.load(counts + other * BINS + bins[None, :], mask=other < shares, other=0)
            counted += tl.sum(read, 0)
            before += tl.sum(tl.where(other < share, read, 0), 0)
    else:
        for start in range(0, assignments, BLOCK):
            i = start + tl.arange(0, BLOCK)
            expert = experts_of(chosen, slots, i, assignments, CHOICES, MASKED, EXPERTS)
            counted += tl.histogram(expert, BINS)
            before += tl.histogram(tl.where(i < share * SHARE, expert, EXPERTS), BINS)
    counted = tl.where(bins < EXPERTS, counted, 0)
    first = tl.cumsum(counted, 0) - counted  # place of each expert
    filled = (counted + ROWS - 1) // ROWS
    tile = tl.cumsum(filled, 0) - filled

    for start in range(share * AT_ONCE, max_tiles, shares * AT_ONCE):
        number = start + some
        within = number[:, None] - tile[None, :]
        owned = (within >= 0) & (within < filled[None, :])
        target = tiles + number * 3
        expert = tl.sum(tl.where(owned, bins[None, :] + 1, 0), 1) - 1
        place = tl.sum(tl.where(owned, first[None, :] + within * ROWS, 0), 1)
        left = tl.sum(tl.where(owned, counted[None, :] - within * ROWS, 0), 1)
        tl.store(target, expert, mask=number < max_tiles)
        tl.store(target + 1, place, mask=number < max_tiles)
        tl.store(target + 2, tl.minimum(left, ROWS), mask=number < max_tiles)

    next_place = first + before
    j = tl.arange(0, SORTED)
    for start in range(0, SHARE, SORTED):
        i = share * SHARE + start + j
        expert = experts_of(chosen, slots, i, assignments, CHOICES, MASKED, EXPERTS)
        earlier = (expert[:, None] == expert[None, :]) & (j[:, None] > j[None, :])
        place = tl.gather(next_place, expert, 0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(order + place, i, mask=expert < EXPERTS)
        next_place += tl.histogram(expert, BINS)


@triton.jit
def assignments_of(tile, order, ROWS: tl.constexpr):
    """A tile's assignments [ROWS] int64, and a mask of those that exist."""
    m = tl.arange(0, ROWS)
    valid = m < tl.load(tile + 2)
    return tl.load(order + tl.load(tile + 1) + m, mask=valid, other=0).to(tl.int64), valid


@triton.jit
def write_inner(
    gate,  # [ROWS, COLUMNS] fp32
    up,
    bias,  # [E, 2 F], any pointer without BIAS
    inner,  # [A, F], written
    expert,
    assignment,
    valid,
    f,
    INTERMEDIATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The gated activation of one tile's rows, with biases."""
    if BIAS:
        of_gate, exists = bias + expert * 2 * INTERMEDIATE + f, f < INTERMEDIATE
        gate += tl.load(of_gate, mask=exists, other=0.0).to(tl.float32)[None, :]
        up += tl.load(of_gate + INTERMEDIATE, mask=exists, other=0.0).to(tl.float32)[None, :]
    result = gated(gate, up, ACTIVATION, SLOPE, LIMIT)
    target = inner + assignment[:, None] * INTERMEDIATE + f[None, :]
    written = valid[:, None] & (f < INTERMEDIATE)[None, :]
    tl.store(target, result.to(inner.dtype.element_ty), mask=written)


@triton.jit
def write_parts(
    summed,  # [ROWS, COLUMNS] fp32
    bias,  # [E, H], any pointer without BIAS
    shares,
    parts,  # [A, H], written
    expert,
    assignment,
    valid,
    h,
    HIDDEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    """share * (y + b) of one tile's rows."""
    if BIAS:
        added = tl.load(bias + expert * HIDDEN + h, mask=h < HIDDEN, other=0.0)
        summed += added.to(tl.float32)[None, :]
    share = tl.load(shares + assignment, mask=valid, other=0.0).to(tl.float32)
    target = parts + assignment[:, None] * HIDDEN + h[None, :]
    written = valid[:, None] & (h < HIDDEN)[None, :]
    tl.store(target, (summed * share[:, None]).to(parts.dtype.element_ty), mask=written)


@triton.jit
def gate_up_tiles(
    x,  # [T, H]
    weight,  # [E, 2, F, H] in strides of their own, gate before up
    bias,  # [E, 2 F], any pointer without BIAS
    order,  # [A] int32
    tiles,  # [N, 3] int32
    inner,  # [A, F], written
    CHOICES: tl.constexpr,  # assignments of a row
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    OUTPUT_STRIDE: tl.constexpr,
    INPUT_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # of H at once
):
    """activation(x gate^T) * (x up^T) of one tile's rows. Program (block of columns, tile)."""
    tile = tiles + tl.program_id(1) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:
        return
    d = tl.arange(0, DEPTH)
    assignment, valid = assignments_of(tile, order, ROWS)
    f = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = x + (assignment // CHOICES)[:, None] * HIDDEN
    gates = weight + expert * EXPERT_STRIDE + f[None, :] * OUTPUT_STRIDE
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        k = start + d
        inside = k < HIDDEN
        a = tl.load(rows + k[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        used = inside[:, None] & (f < INTERMEDIATE)[None, :]
        at = gates + k[:, None] * INPUT_STRIDE
        b = tl.load(at, mask=used, other=0.0)
        c = tl.load(at + UP_STRIDE, mask=used, other=0.0)
        gate = tl.dot(a, b, gate, input_precision="ieee")
        up = tl.dot(a, c, up, input_precision="ieee")
    write_inner(
        gate,
        up,
        bias,
        inner,
        expert,
        assignment,
        valid,
        f,
        INTERMEDIATE,
        ACTIVATION,
        SLOPE,
        LIMIT,
        BIAS,
    )


@triton.jit
def down_tiles(
    inner,  # [A, F]
    weight,  # [E, H, F] in strides of their own
    bias,  # [E, H], any pointer without BIAS
    shares,  # [A], what an assignment is multiplied by
    order,  # [A] int32
    tiles,  # [N, 3] int32
    parts,  # [A, H], written
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    OUTPUT_STRIDE: tl.constexpr,
    INPUT_STRIDE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # of F at once
):
    """share * (inner down^T) of one tile's rows. Program (block of columns, tile)."""
    tile = tiles + tl.program_id(1) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:
        return
    d = tl.arange(0, DEPTH)
    assignment, valid = assignments_of(tile, order, ROWS)
    h = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = inner + assignment[:, None] * INTERMEDIATE
    columns = weight + expert * EXPERT_STRIDE + h[None, :] * OUTPUT_STRIDE
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INTERMEDIATE, DEPTH):
        k = start + d
        inside = k < INTERMEDIATE
        a = tl.load(rows + k[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        used = inside[:, None] & (h < HIDDEN)[None, :]
        b = tl.load(columns + k[:, None] * INPUT_STRIDE, mask=used, other=0.0)
        summed = tl.dot(a, b, summed, input_precision="ieee")
    write_parts(summed, bias, shares, parts, expert, assignment, valid, h, HIDDEN, BIAS)


@triton.jit
def coded_gate_up_tiles(
    x,  # [T, H] of 16 bits
    codes,  # [E * 2 F, C] int16 as for `coded_columns`, gate above up of each expert
    groups,  # [G, E * 2 F], as are zeros
    zeros,
    bias,  # [E, 2 F], any pointer without BIAS
    order,  # [A] int32
    tiles,  # [N, 3] int32
    inner,  # [A, F], written
    CHOICES: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    INPUTS: tl.constexpr,  # H
    ROW_CODES: tl.constexpr,  # C
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
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """`gate_up_tiles` of weights of codes, which stand on the left (`coded_columns`)."""
    tile = tiles + tl.program_id(1) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:
        return
    PART: tl.constexpr = DEPTH // (16 // BITS)
    assignment, valid = assignments_of(tile, order, ROWS)
    f = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists, there = f < INTERMEDIATE, valid[:, None]
    k = tl.arange(0, PART)
    rows = x + (assignment // CHOICES)[:, None] * INPUTS + k[None, :]
    n = expert * 2 * INTERMEDIATE + f
    gates = codes + n[:, None] * ROW_CODES + k[None, :]
    gate = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(0, (INPUTS + DEPTH - 1) // DEPTH, num_stages=STAGES):
        at = gates + block * PART
        of_gate = tl.load(at, mask=exists[:, None], other=0)
        of_up = tl.load(at + INTERMEDIATE * ROW_CODES, mask=exists[:, None], other=0)
        gate = add_block(
            gate,
            of_gate,
            rows,
            there,
            groups,
            zeros,
            n,
            exists,
            block * DEPTH,
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
        up = add_block(
            up,
            of_up,
            rows,
            there,
            groups,
            zeros,
            n + INTERMEDIATE,
            exists,
            block * DEPTH,
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
    write_inner(
        tl.trans(gate),
        tl.trans(up),
        bias,
        inner,
        expert,
        assignment,
        valid,
        f,
        INTERMEDIATE,
        ACTIVATION,
        SLOPE,
        LIMIT,
        BIAS,
    )


@triton.jit
def coded_down_tiles(
    inner,  # [A, F] of 16 bits
    codes,  # [E * H, C] int16 as for `coded_columns`
    groups,  # [G, E * H], as are zeros
    zeros,
    bias,  # [E, H], any pointer without BIAS
    shares,  # [A]
    order,  # [A] int32
    tiles,  # [N, 3] int32
    parts,  # [A, H], written
    HIDDEN: tl.constexpr,
    INPUTS: tl.constexpr,  # F
    ROW_CODES: tl.constexpr,  # C
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
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """`down_tiles` of weights of codes, which stand on the left (`coded_columns`)."""
    tile = tiles + tl.program_id(1) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:
        return
    PART: tl.constexpr = DEPTH // (16 // BITS)
    assignment, valid = assignments_of(tile, order, ROWS)
    h = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists, there = h < HIDDEN, valid[:, None]
    k = tl.arange(0, PART)
    rows = inner + assignment[:, None] * INPUTS + k[None, :]
    n = expert * HIDDEN + h
    columns = codes + n[:, None] * ROW_CODES + k[None, :]
    summed = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(0, (INPUTS + DEPTH - 1) // DEPTH, num_stages=STAGES):
        packed = tl.load(columns + block * PART, mask=exists[:, None], other=0)
        summed = add_block(
            summed,
            packed,
            rows,
            there,
            groups,
            zeros,
            n,
            exists,
            block * DEPTH,
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
    write_parts(y, bias, shares, parts, expert, assignment, valid, h, HIDDEN, BIAS)


@triton.jit
def add_choices(
    parts,  # [T, K, H]
    chosen,  # [T, K] int64
    slots,  # [T] int64, as for `map_tiles`
    out,  # [T, H], written
    CHOICES: tl.constexpr,
    MASKED: tl.constexpr,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of a row's choices, in their order. Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = h < HIDDEN
    if MASKED:
        used &= tl.load(slots + row) >= 0
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOICES):
        place = row * CHOICES + choice
        expert = tl.load(chosen + place)
        there = used & (expert >= 0) & (expert < EXPERTS)
        total += tl.load(parts + place * HIDDEN + h, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + h, total.to(out.dtype.element_ty), mask=h < HIDDEN)
