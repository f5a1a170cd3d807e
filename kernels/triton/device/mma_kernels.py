"""Matrix products of 5 to 16 rows on tensor cores, weights on the left: all of them at once.

A product of so few rows costs what its weights take to arrive. So each program requests all of
its weights before anything else, as `row_kernels` do, and here the tensor cores multiply them.
They multiply 16 outputs by 8 rows or 16; the inputs of an output are cut over the warps, whose sums
are added at the end. Norm, bias, activation and residual are as in `row_kernels`.

With PDL (`rayfin.kernels.triton.pdl`) the weights are on their way before a program waits for its
inputs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rayfin.kernels.triton.device.activation import activated


@triton.jit(do_not_specialize=["rows"])
def mma_product(
    x,  # [T, K]
    weight,  # [N, K]; with GATED [2 N, K], gate above up
    bias,  # [N] or [2 N], any pointer without BIAS
    out,  # [T, N], written; with ADD the residual stream
    rows,  # T, at most ROWS
    eps,
    gain,  # factor on rows divided by their root mean square, with NORM
    scale,  # factor on the added product
    INPUTS: tl.constexpr,  # K
    OUTPUTS: tl.constexpr,  # N
    ACTIVATION: tl.constexpr,  # with GATED
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the weight, half of them ups with GATED
    PARTS: tl.constexpr,  # of the inputs of a block, one for each warp
    DEPTH: tl.constexpr,  # inputs of a part
    BLOCKS: tl.constexpr,  # of PARTS * DEPTH inputs
    PDL: tl.constexpr = False,
):
    """y = gain * x / rms(x) W^T + b; out = y, out += scale * y, or activation(gate) * up of y.

    Program (columns).
    """
    m = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    n = tl.program_id(0) * COLUMNS + column
    line = n  # of the weight
    if GATED:
        n = tl.program_id(0) * (COLUMNS // 2) + column % (COLUMNS // 2)
        line = n + column // (COLUMNS // 2) * OUTPUTS
    part = (tl.arange(0, PARTS) * DEPTH)[:, None] + tl.arange(0, DEPTH)[None, :]
    weights = ()
    for block in tl.static_range(BLOCKS):
        k = block * PARTS * DEPTH + part
        known = (n < OUTPUTS)[None, :, None] & (k < INPUTS)[:, None, :]
        place = weight + line[None, :, None] * INPUTS + k[:, None, :]
        weights = weights + (tl.load(place, mask=known, other=0.0),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    summed = tl.zeros([PARTS, COLUMNS, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for block in tl.static_range(BLOCKS):
        k = block * PARTS * DEPTH + part
        known = (k < INPUTS)[:, :, None] & (m < rows)[None, None, :]
        a = tl.load(x + m[None, None, :] * INPUTS + k[:, :, None], mask=known, other=0.0)
        summed = tl.dot(weights[block], a, summed, input_precision="ieee")
        if NORM:
            wide = a.to(tl.float32)
            squares += tl.sum(tl.sum(wide * wide, 1), 0)
    y = tl.sum(summed, 0)  # [COLUMNS, ROWS]
    if NORM:
        y *= (gain * tl.rsqrt(squares / INPUTS + eps))[None, :]
    if BIAS:
        y += tl.load(bias + line, mask=n < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.reshape(y, [2, COLUMNS // 2, ROWS])
        gate, up = tl.split(tl.permute(pairs, [1, 2, 0]))
        y = activated(gate, ACTIVATION) * up
        n = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    target = out + m[None, :] * OUTPUTS + n[:, None]
    written = (n < OUTPUTS)[:, None] & (m < rows)[None, :]
    if ADD:
        y = tl.load(target, mask=written, other=0.0).to(tl.float32) + y * scale
    tl.store(target, y.to(out.dtype.element_ty), mask=written)
