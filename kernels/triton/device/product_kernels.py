"""Matrix products of few rows, fused with the operations around them.

A step of few rows reads every weight once and computes little, so launches are the other cost.
Each program therefore computes the norm of its input rows itself, and applies what follows a
product before it stores the result. The norm's weights are folded into the product's; what remains
is one number per row, which divides the sums in float32.

With PDL (`rayfin.kernels.triton.pdl`) a program starts while the kernel before it computes. It then
has the first weights brought to the L2 cache before it waits for its inputs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rayfin.kernels.triton.device.activation import activated

LINE = tl.constexpr(128)  # bytes of a cache line
AHEAD = tl.constexpr(256)  # lines that a program prefetches from one matrix: 32 KiB


@triton.jit
def prefetch(weight, n, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Has the first columns of the rows ``n`` of a weight [OUTPUTS, INPUTS] brought to L2."""
    step: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
    k = tl.minimum(tl.arange(0, AHEAD // COLUMNS) * step, INPUTS - 1)
    lines = weight + tl.minimum(n, OUTPUTS - 1)[:, None] * INPUTS + k[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [lines.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def rows_part(x, m, k, rows, INPUTS: tl.constexpr):
    """Inputs k of the rows m."""
    known = (m < rows)[:, None] & (k < INPUTS)[None, :]
    return tl.load(x + m[:, None] * INPUTS + k[None, :], mask=known, other=0.0)


@triton.jit
def norm_factor(
    x,
    m,
    rows,
    eps,
    gain,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """gain / rms of the rows m of x [T, INPUTS]: [ROWS].

    In a loop of its own, over what the products have brought to the cache: of a block that both a
    product and a sum read, Triton makes a layout in shared memory that is slow to read for both.
    """
    squares = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        wide = rows_part(x, m, start + tl.arange(0, DEPTH), rows, INPUTS).to(tl.float32)
        squares += wide * wide
    return gain * tl.rsqrt(tl.sum(squares, 1) / INPUTS + eps)


@triton.jit(do_not_specialize=["rows"])
def product(
    x,  # [T, K]
    weight,  # [N, K]
    bias,  # [N], any pointer without BIAS
    out,  # [T, N], written; with ADD the residual stream
    rows,  # T
    eps,
    gain,  # factor on rows divided by their root mean square, with NORM
    scale,  # factor on the added product
    INPUTS: tl.constexpr,  # K
    OUTPUTS: tl.constexpr,  # N
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # of K at once
    PDL: tl.constexpr = False,
):
    """y = gain * x / rms(x) W^T + b, and out = y, or out += scale * y.

    Program (block of columns, of rows). A row's root mean square is known after the whole row
    has been multiplied.
    """
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    written = (m < rows)[:, None] & (n < OUTPUTS)[None, :]
    target = out + m[:, None] * OUTPUTS + n[None, :]
    if PDL:
        gdc_launch_dependents()
        prefetch(weight, n, OUTPUTS, INPUTS, COLUMNS)
        gdc_wait()
    if ADD:  # before the loop, which hides the round trip
        residual = tl.load(target, mask=written, other=0.0).to(tl.float32)
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = k < INPUTS
        a = rows_part(x, m, k, rows, INPUTS)
        used = inside[:, None] & (n < OUTPUTS)[None, :]
        b = tl.load(weight + n[None, :] * INPUTS + k[:, None], mask=used, other=0.0)
        summed = tl.dot(a, b, summed, input_precision="ieee")
    if NORM:
        summed = summed * norm_factor(x, m, rows, eps, gain, INPUTS, ROWS, DEPTH)[:, None]
    if BIAS:
        summed += tl.load(bias + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    if ADD:
        summed = residual + summed * scale
    tl.store(target, summed.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["rows"])
def gated_product(
    x,  # [T, K]
    weight,  # [2 F, K], gate above up
    bias,  # [2 F], any pointer without BIAS
    out,  # [T, F], written
    rows,  # T
    eps,
    gain,  # factor on rows divided by their root mean square, with NORM
    INPUTS: tl.constexpr,  # K
    OUTPUTS: tl.constexpr,  # F
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # of K at once
    PDL: tl.constexpr = False,
):
    """activation(gate) * up of gain * x / rms(x) [gate | up]^T + b.

    Program (block of columns, of rows).
    """
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if PDL:
        gdc_launch_dependents()
        prefetch(weight, n, OUTPUTS, INPUTS, COLUMNS)
        prefetch(weight + OUTPUTS * INPUTS, n, OUTPUTS, INPUTS, COLUMNS)
        gdc_wait()
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = k < INPUTS
        a = rows_part(x, m, k, rows, INPUTS)
        used = inside[:, None] & (n < OUTPUTS)[None, :]
        gates = weight + n[None, :] * INPUTS + k[:, None]
        b = tl.load(gates, mask=used, other=0.0)
        c = tl.load(gates + OUTPUTS * INPUTS, mask=used, other=0.0)
        gate = tl.dot(a, b, gate, input_precision="ieee")
        up = tl.dot(a, c, up, input_precision="ieee")
    if NORM:
        factor = norm_factor(x, m, rows, eps, gain, INPUTS, ROWS, DEPTH)[:, None]
        gate, up = gate * factor, up * factor
    if BIAS:
        exists = n < OUTPUTS
        gate += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + OUTPUTS + n, mask=exists, other=0.0).to(tl.float32)[None, :]
    result = activated(gate, ACTIVATION) * up
    written = (m < rows)[:, None] & (n < OUTPUTS)[None, :]
    target = out + m[:, None] * OUTPUTS + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=written)
