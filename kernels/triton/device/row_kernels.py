"""Matrix products of one to four rows, without tensor cores: a program reads whole rows of weights.

A product of so few rows costs what its weights take to arrive, and one round trip to memory. So
each program has all its weights on their way at once, in registers, and reads each weight once for
all rows. Tensor cores would multiply padding, and take the weights by way of shared memory.

With PDL (`rayfin.kernels.triton.pdl`) the weights are on their way before a program waits for its
inputs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rayfin.kernels.triton.device.activation import activated


@triton.jit
def weights_of(weight, n, k, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """The rows n of a weight [OUTPUTS, INPUTS]: [COLUMNS, WIDTH]."""
    known = (n < OUTPUTS)[:, None] & (k < INPUTS)[None, :]
    return tl.load(weight + n[:, None] * INPUTS + k[None, :], mask=known, other=0.0)


@triton.jit
def inputs_of(x, row, k, eps, gain, INPUTS: tl.constexpr, NORM: tl.constexpr):
    """A row of x [T, INPUTS] in fp32: [1, WIDTH], and what its products are multiplied by."""
    at = k[None, :]
    a = tl.load(x + row * INPUTS + at, mask=at < INPUTS, other=0.0).to(tl.float32)
    factor = tl.full([], 1.0, tl.float32)
    if NORM:
        factor = gain * tl.rsqrt(tl.sum(a * a) / INPUTS + eps)
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
    """`product_kernels.product`. Program (block of columns)."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, WIDTH)
    exists = n < OUTPUTS
    if PDL:
        gdc_launch_dependents()
    weights = weights_of(weight, n, k, OUTPUTS, INPUTS)
    if PDL:
        gdc_wait()
    for row in tl.static_range(ROWS):
        if row < rows:
            target = out + row * OUTPUTS + n
            if ADD:
                residual = tl.load(target, mask=exists, other=0.0).to(tl.float32)
            a, factor = inputs_of(x, row, k, eps, gain, INPUTS, NORM)
            summed = tl.sum(weights.to(tl.float32) * a, 1) * factor
            if BIAS:
                summed += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)
            if ADD:
                summed = residual + summed * scale
            tl.store(target, summed.to(out.dtype.element_ty), mask=exists)


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
    """`product_kernels.gated_product`. Program (block of columns)."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, WIDTH)
    exists = n < OUTPUTS
    if PDL:
        gdc_launch_dependents()
    gates = weights_of(weight, n, k, OUTPUTS, INPUTS)
    ups = weights_of(weight + OUTPUTS * INPUTS, n, k, OUTPUTS, INPUTS)
    if PDL:
        gdc_wait()
    for row in tl.static_range(ROWS):
        if row < rows:
            a, factor = inputs_of(x, row, k, eps, gain, INPUTS, NORM)
            gate = tl.sum(gates.to(tl.float32) * a, 1) * factor
            up = tl.sum(ups.to(tl.float32) * a, 1) * factor
            if BIAS:
                gate += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)
                up += tl.load(bias + OUTPUTS + n, mask=exists, other=0.0).to(tl.float32)
            result = activated(gate, ACTIVATION) * up
            tl.store(out + row * OUTPUTS + n, result.to(out.dtype.element_ty), mask=exists)
