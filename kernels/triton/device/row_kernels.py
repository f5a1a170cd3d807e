"""Matrix products of few rows, without tensor cores: a program reads whole rows of weights.

A product of so few rows costs what its weights take to arrive, and one round trip to memory. So
each program has all its weights on their way at once, in registers, and reads each weight once for
all rows. Tensor cores would multiply padding, and take the weights by way of shared memory.

Each program computes the norm of its input rows itself, and applies what follows a product before
it stores the result. The norm's weights are folded into the product's; what remains is one number
per row, which multiplies the sums in float32.

With PDL (`rayfin.kernels.triton.pdl`) the weights are on their way before a program waits for its
inputs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rayfin.kernels.triton.device.activation import activated


@triton.jit
def weights_of(weight, n, k, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """The rows n of a weight [OUTPUTS, INPUTS]: [1, COLUMNS, WIDTH]."""
    known = (n < OUTPUTS)[None, :, None] & (k < INPUTS)[None, None, :]
    return tl.load(weight + n[None, :, None] * INPUTS + k[None, None, :], mask=known, other=0.0)


@triton.jit
def rows_of(x, m, k, rows, eps, gain, INPUTS: tl.constexpr, NORM: tl.constexpr):
    """The rows m of x [T, INPUTS] in fp32: [ROWS, 1, WIDTH], and the factor of each [ROWS, 1]."""
    known = (m < rows)[:, None, None] & (k < INPUTS)[None, None, :]
    a = tl.load(x + m[:, None, None] * INPUTS + k[None, None, :], mask=known, other=0.0)
    a = a.to(tl.float32)
    factor = tl.full([1, 1], 1.0, tl.float32)
    if NORM:
        factor = gain * tl.rsqrt(tl.sum(a * a, 2) / INPUTS + eps)
    return a, factor


@triton.jit(do_not_specialize=["rows"])
def product(
    x,  # [T, K]
    weight,  # [N, K]
    bias,  # [N], any pointer without BIAS
    out,  # [T, N], written; with ADD the residual stream
    rows,  # T, at most ROWS
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
    WIDTH: tl.constexpr,  # K up to a power of two
    PDL: tl.constexpr = False,
):
    """y = gain * x / rms(x) W^T + b, and out = y, or out += scale * y. Program (columns)."""
    m = tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, WIDTH)
    written = (m < rows)[:, None] & (n < OUTPUTS)[None, :]
    target = out + m[:, None] * OUTPUTS + n[None, :]
    weights = weights_of(weight, n, k, OUTPUTS, INPUTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    a, factor = rows_of(x, m, k, rows, eps, gain, INPUTS, NORM)
    if ADD:
        residual = tl.load(target, mask=written, other=0.0).to(tl.float32)
    summed = tl.sum(weights.to(tl.float32) * a, 2) * factor
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
    rows,  # T, at most ROWS
    eps,
    gain,  # factor on rows divided by their root mean square, with NORM
    INPUTS: tl.constexpr,  # K
    OUTPUTS: tl.constexpr,  # F
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,  # K up to a power of two
    PDL: tl.constexpr = False,
):
    """activation(gate) * up of gain * x / rms(x) [gate | up]^T + b. Program (columns)."""
    m = tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, WIDTH)
    gates = weights_of(weight, n, k, OUTPUTS, INPUTS)
    ups = weights_of(weight + OUTPUTS * INPUTS, n, k, OUTPUTS, INPUTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    a, factor = rows_of(x, m, k, rows, eps, gain, INPUTS, NORM)
    gate = tl.sum(gates.to(tl.float32) * a, 2) * factor
    up = tl.sum(ups.to(tl.float32) * a, 2) * factor
    if BIAS:
        exists = n < OUTPUTS
        gate += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + OUTPUTS + n, mask=exists, other=0.0).to(tl.float32)[None, :]
    result = activated(gate, ACTIVATION) * up
    written = (m < rows)[:, None] & (n < OUTPUTS)[None, :]
    target = out + m[:, None] * OUTPUTS + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=written)
