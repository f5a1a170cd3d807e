"""The operations of a decoder layer between its matrix products."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rayfin.kernels.triton.device.activation import activated

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


@triton.jit
def add_and_norm(
    x,  # [T, D] a block's output
    hidden,  # [T, D] the residual stream, written in place
    out_weight,  # [D] fp32, any pointer without OUT_NORM
    weight,  # [D] fp32, any pointer without NORM
    out,  # [T, D] the next block's input, any pointer without NORM
    x_stride,
    eps,
    residual_scale,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    OUT_NORM: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """hidden += scale * norm(x), then out = norm(hidden); each step is optional.

    Program (row). Without ADD it norms x.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < SIZE
    # Weights are no kernel's output, so they are read before the wait.
    if OUT_NORM:
        out_gain = tl.load(out_weight + d, mask=inside, other=0.0)
    if NORM:
        gain = tl.load(weight + d, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    if OUT_NORM:
        factor = tl.rsqrt(tl.sum(value * value) / SIZE + eps)
        scaled = value * factor * out_gain
        value = scaled.to(x.dtype.element_ty).to(tl.float32)
    if ADD:
        old = tl.load(hidden + row * SIZE + d, mask=inside, other=0.0).to(tl.float32)
        added = (old + value * residual_scale).to(hidden.dtype.element_ty)
        tl.store(hidden + row * SIZE + d, added, mask=inside)
        value = added.to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(value * value) / SIZE + eps)
        scaled = value * factor * gain
        tl.store(out + row * SIZE + d, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_factor(residual, row, eps, gain, INPUTS: tl.constexpr, INPUT_WIDTH: tl.constexpr):
    """gain / rms of a row of the residual stream [T, INPUTS]."""
    k = tl.arange(0, INPUT_WIDTH)
    values = tl.load(residual + row * INPUTS + k, mask=k < INPUTS, other=0.0).to(tl.float32)
    return gain * tl.rsqrt(tl.sum(values * values) / INPUTS + eps)


@triton.jit
def rope_and_write_kv(
    qkv,  # [T, >= H * Dk + Hkv * (Dk + Dv)]: query, key and value heads side by side
    query_norm,  # [Dk] fp32, any pointer without QUERY_NORM
    key_norm,  # [Dk] fp32, any pointer without KEY_NORM
    cosines,  # [positions, HALF] fp32
    sines,  # [positions, HALF] fp32
    positions,  # [T] int64
    slots,  # [T] int64, negative = write nothing
    query,  # [T, H, Dk], written
    k_pages,  # [num_pages, page_size, Hkv, Dk], written
    v_pages,  # [num_pages, page_size, Hkv, Dv], written
    qkv_stride,
    eps,
    residual,  # [T, INPUTS] the input of qkv's product, any pointer without NORM
    bias,  # [H * Dk + Hkv * (Dk + Dv)], any pointer without BIAS
    gain,
    INPUTS: tl.constexpr,
    INPUT_WIDTH: tl.constexpr,  # up to a power of two
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # the larger of both, up to a power of two
    HALF: tl.constexpr,  # rotated pairs; dims from 2 * HALF stay
    AT_ONCE: tl.constexpr,  # heads of a program
    QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Norms query and key heads, applies rotary embedding, and writes keys and values to pages.

    Program (token, some heads). Pair i of a head is (x[i], x[i + HALF]). First, with NORM
    qkv is multiplied by gain / rms(residual), and with BIAS the bias is added. Positions, slots and
    tables are complete when a step's first layer starts, so they are read before PDL's wait.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    d = tl.arange(0, WIDTH)
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    kv_head = tl.where(is_query, 0, tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS))
    exists = head < HEADS + 2 * KV_HEADS
    size = tl.where(is_value, VALUE_DIM, KEY_DIM)
    start = tl.where(is_value, (HEADS + KV_HEADS) * KEY_DIM + kv_head * VALUE_DIM, head * KEY_DIM)
    inside = exists[:, None] & (d[None, :] < size[:, None])
    turned = d < 2 * HALF
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    pair = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(cosines + position * HALF + pair, mask=turned, other=1.0)
    sin = tl.load(sines + position * HALF + pair, mask=turned, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)

    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = qkv + token * qkv_stride + start[:, None]
    x = tl.load(source + d[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.where(d < HALF, d + HALF, tl.where(turned, d - HALF, d))
    has_partner = inside & turned[None, :] & (is_value == 0)[:, None]
    partner = tl.load(source + other[None, :], mask=has_partner, other=0.0).to(tl.float32)
    if NORM:
        scale = row_factor(residual, token, eps, gain, INPUTS, INPUT_WIDTH)
        x, partner = x * scale, partner * scale
    if BIAS:
        offsets = bias + start[:, None]
        x += tl.load(offsets + d[None, :], mask=inside, other=0.0).to(tl.float32)
        partner += tl.load(offsets + other[None, :], mask=has_partner, other=0.0).to(tl.float32)
    if QUERY_NORM or KEY_NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / KEY_DIM + eps)[:, None]
        known = d < KEY_DIM
        if QUERY_NORM:
            weight = tl.load(query_norm + d, mask=known, other=0.0)
            partner_weight = tl.load(query_norm + other, mask=known, other=0.0)
            x = tl.where(is_query[:, None], x * factor * weight[None, :], x)
            partner = tl.where(
                is_query[:, None], partner * factor * partner_weight[None, :], partner
            )
        if KEY_NORM:
            is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
            weight = tl.load(key_norm + d, mask=known, other=0.0)
            partner_weight = tl.load(key_norm + other, mask=known, other=0.0)
            x = tl.where(is_key[:, None], x * factor * weight[None, :], x)
            partner = tl.where(is_key[:, None], partner * factor * partner_weight[None, :], partner)

    rotated = x * cos[None, :] + partner * sin[None, :]
    x = tl.where(is_value[:, None], x, rotated)

    target = query + (token * HEADS + head[:, None]) * KEY_DIM + d[None, :]
    tl.store(target, x.to(query.dtype.element_ty), mask=inside & is_query[:, None])
    stored = inside & (is_query == 0)[:, None] & (slot >= 0)
    cell = slot * KV_HEADS + kv_head[:, None]
    paged = to_page(x, k_pages)
    tl.store(k_pages + cell * KEY_DIM + d[None, :], paged, mask=stored & (is_value == 0)[:, None])
    tl.store(v_pages + cell * VALUE_DIM + d[None, :], paged, mask=stored & is_value[:, None])


@triton.jit(
    do_not_specialize=["key_stride", "key_head_stride", "value_stride", "value_head_stride"]
)
def store_kv(
    key,  # [T, Hkv, Dk]
    value,  # [T, Hkv, Dv]
    k_pages,  # [num_pages, page_size, Hkv, Dk], written
    v_pages,  # [num_pages, page_size, Hkv, Dv], written
    slots,  # [T] int64, negative = write nothing
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,  # up to a power of two
    WIDTH: tl.constexpr,  # the larger of both, up to a power of two
):
    """Copies a token's keys and values to its slot. Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_WIDTH)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    slot = tl.load(slots + token)
    exists = (head < KV_HEADS) & (slot >= 0)
    cell = slot * KV_HEADS + head
    source = key + token * key_stride + head * key_head_stride + d
    x = tl.load(source, mask=exists & (d < KEY_DIM), other=0.0).to(tl.float32)
    target = k_pages + cell * KEY_DIM + d
    tl.store(target, to_page(x, k_pages), mask=exists & (d < KEY_DIM))
    source = value + token * value_stride + head * value_head_stride + d
    x = tl.load(source, mask=exists & (d < VALUE_DIM), other=0.0).to(tl.float32)
    target = v_pages + cell * VALUE_DIM + d
    tl.store(target, to_page(x, v_pages), mask=exists & (d < VALUE_DIM))


@triton.jit
def gate(
    gate_up,  # [T, 2 F]
    out,  # [T, F]
    size,
    eps,
    residual,  # [T, INPUTS] the input of gate_up's product, any pointer without NORM
    bias,  # [2 F], any pointer without BIAS
    gain,
    INPUTS: tl.constexpr,
    INPUT_WIDTH: tl.constexpr,  # up to a power of two
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """activation(gate) * up. Program (row, block of columns).

    First, with NORM both are multiplied by gain / rms(residual), and with BIAS the bias is added.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < size
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(gate_up + row * 2 * size + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + d, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = row_factor(residual, row, eps, gain, INPUTS, INPUT_WIDTH)
        x, up = x * scale, up * scale
    if BIAS:
        x += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + size + d, mask=inside, other=0.0).to(tl.float32)
    result = activated(x, ACTIVATION) * up
    tl.store(out + row * size + d, result.to(out.dtype.element_ty), mask=inside)
