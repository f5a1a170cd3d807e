"""Conversion of keys and values to the dtype of pages."""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)  # the largest number of e4m3
SMALLEST_NORMAL = tl.constexpr(0.015625)  # 2**-6; numbers below it are 2**-9 apart
SHIFT = tl.constexpr(1572864.0)  # 1.5 * 2**20: fp32 beside it has three bits behind the first


@triton.jit
def to_page(x, pages):
    """fp32 -> the dtype of ``pages``. For fp8 (e4m3) it rounds to nearest, ties to even.

    It rounds before the cast, because the interpreter's cast does not round and not every machine's
    cast saturates. NaN stays NaN.
    """
    if pages.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shift = tl.maximum(power, SMALLEST_NORMAL) * SHIFT
        x = (x + shift) - shift
    return x.to(pages.dtype.element_ty)
