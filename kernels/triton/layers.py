"""The operations of a decoder layer between its matrix products."""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from rayfin.kernels.triton.device import layer_kernels as kernels
from rayfin.kernels.triton.device.activation import ACTIVATIONS
from rayfin.kernels.triton.pdl import launch_options

HEADS_AT_ONCE = 8
COLUMNS_AT_ONCE = 1024
HEADS_AT_ONCE_BEHIND, COLUMNS_AT_ONCE_BEHIND = 16, 4096
"""Per program; more after a product, since each program then reads its row's stream too."""


@dataclass(frozen=True, slots=True)
class Behind:
    """The part of a product that the next kernel has to finish.

    The product is x W^T of a residual stream x; the result has to be gain * x / rms(x) W^T + bias.
    W includes the norm's weights over ``gain``. So the norm needs no launch, and torch's product
    reads the stream directly.
    """

    stream: torch.Tensor  # [T, D]
    gain: float
    bias: torch.Tensor | None = None  # [N]


def add_and_norm(
    x: torch.Tensor,  # [T, D]
    hidden: torch.Tensor,  # [T, D]
    weight: torch.Tensor | None,  # [D] fp32
    eps: float,
    *,
    out_weight: torch.Tensor | None = None,  # [D] fp32
    residual_scale: float = 1.0,
    pdl: bool = False,
) -> torch.Tensor:
    """Adds a block's output to the residual stream in place and returns the next block's input.

    ``out_weight`` norms the output before it is added (Gemma, OLMo 2).

    Returns:
        [T, D] the norm of the stream, or the stream itself where ``weight`` is None.
    """
    out = hidden if weight is None else torch.empty_like(hidden)
    _launch_norm(x, hidden, out_weight, weight, out, eps, residual_scale, add=True, pdl=pdl)
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = False
) -> torch.Tensor:
    """`reference.rms_norm` of rows [T, D], which may be a slice of wider rows."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, x, None, weight, out, eps, 1.0, add=False, pdl=pdl)
    return out


def _launch_norm(
    x: torch.Tensor,
    hidden: torch.Tensor,
    out_weight: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    residual_scale: float,
    *,
    add: bool,
    pdl: bool,
) -> None:
    rows, size = x.shape
    width = triton.next_power_of_2(size)
    kernels.add_and_norm[(rows,)](
        x,
        hidden,
        x if out_weight is None else out_weight,
        x if weight is None else weight,
        out,
        x.stride(0),
        eps,
        residual_scale,
        SIZE=size,
        WIDTH=width,
        ADD=add,
        OUT_NORM=out_weight is not None,
        NORM=weight is not None,
        num_warps=min(max(width // 512, 1), 16),
        **launch_options(pdl),
    )


def rope_and_write_kv(
    qkv: torch.Tensor,  # [T, H * Dk + Hkv * (Dk + Dv)]
    query_norm: torch.Tensor | None,  # [Dk] fp32
    key_norm: torch.Tensor | None,  # [Dk] fp32
    tables: tuple[torch.Tensor, torch.Tensor],  # cosines and sines, [positions, pairs] fp32
    positions: torch.Tensor,  # [T] int64
    slots: torch.Tensor,  # [T] int64
    k_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dk]
    v_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dv]
    *,
    heads: int,
    eps: float,
    behind: Behind | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Norms heads, applies rotary embedding and writes pages in one launch (HPC-Ops, 2026).

    Tokens with a negative slot are not written. ``behind`` is finished first.

    Returns:
        [T, H, Dk] the queries, for `PagedAttention`.
    """
    kv_heads, key_dim = k_pages.shape[2:]
    value_dim = v_pages.shape[3]
    tokens, all_heads = len(qkv), heads + 2 * kv_heads
    at_once = HEADS_AT_ONCE if behind is None else HEADS_AT_ONCE_BEHIND
    query = torch.empty(tokens, heads, key_dim, dtype=qkv.dtype, device=qkv.device)
    kernels.rope_and_write_kv[(tokens, triton.cdiv(all_heads, at_once))](
        qkv,
        qkv if query_norm is None else query_norm,
        qkv if key_norm is None else key_norm,
        *tables,
        positions,
        slots,
        query,
        k_pages,
        v_pages,
        qkv.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=triton.next_power_of_2(max(key_dim, value_dim)),
        HALF=tables[0].shape[1],
        AT_ONCE=at_once,
        QUERY_NORM=query_norm is not None,
        KEY_NORM=key_norm is not None,
        num_warps=4,
        **_end(qkv, behind),
        **launch_options(pdl),
    )
    return query


def store_kv(
    key: torch.Tensor,  # [T, Hkv, Dk]
    value: torch.Tensor,  # [T, Hkv, Dv]
    k_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dk]
    v_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dv]
    slots: torch.Tensor,  # [T] int64
) -> None:
    """Writes keys and values to their slots; tokens with a negative one are not written."""
    tokens, kv_heads, key_dim = key.shape
    value_dim = value.shape[2]
    if not tokens:
        return
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    kernels.store_kv[(tokens,)](
        key,
        value,
        k_pages,
        v_pages,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        KV_HEADS=kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        HEADS_WIDTH=triton.next_power_of_2(kv_heads),
        WIDTH=triton.next_power_of_2(max(key_dim, value_dim)),
        num_warps=4,
    )


def gate(
    gate_up: torch.Tensor,  # [T, 2 F] = [gate | up]
    activation: str,
    *,
    eps: float = 0.0,
    behind: Behind | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """activation(gate) * up, by a name of `ACTIVATIONS`: [T, F].

    ``behind`` is finished first.
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(rows, size)
    at_once = COLUMNS_AT_ONCE if behind is None else COLUMNS_AT_ONCE_BEHIND
    kernels.gate[(rows, triton.cdiv(size, at_once))](
        gate_up,
        out,
        size,
        eps,
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK=at_once,
        num_warps=4 if behind is None else 8,
        **_end(gate_up, behind),
        **launch_options(pdl),
    )
    return out


def _end(product: torch.Tensor, behind: Behind | None) -> dict[str, Any]:
    """The kernel arguments that finish the product before it."""
    stream = product if behind is None else behind.stream
    bias = None if behind is None else behind.bias
    assert behind is None or stream.is_contiguous()
    return {
        "residual": stream,
        "bias": product if bias is None else bias,
        "gain": 1.0 if behind is None else behind.gain,
        "INPUTS": stream.shape[1],
        "INPUT_WIDTH": triton.next_power_of_2(stream.shape[1]),
        "NORM": behind is not None,
        "BIAS": bias is not None,
    }
