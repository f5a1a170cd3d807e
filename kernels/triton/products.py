"""Matrix products of few rows, fused with what stands around them, as functions of tensors.

For decode rows, where a launch costs as much as a small product. For many rows torch's own product
is the better one, and what a launch costs is not felt.
"""

from typing import Any

import torch
import triton

from rayfin.kernels.triton import product_kernels as kernels
from rayfin.kernels.triton.activation import ACTIVATIONS

FEW_ROWS = 64
"""Rows that one tile holds: each weight is read once. Not measured on a GPU yet."""

DTYPES = (torch.float32, torch.bfloat16)
"""Rows are multiplied by the norm's weights before they are divided: that may be over float16."""


def normed_product(
    x: torch.Tensor,  # [T, K]
    norm: torch.Tensor | None,  # [K] fp32
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None,  # [N]
    eps: float,
) -> torch.Tensor:
    """norm(x) W^T + b: [T, N]. Without ``norm`` of x as it is."""
    out = x.new_empty(len(x), len(weight))
    _launch(x, norm, weight, bias, out, eps, 1.0, add=False)
    return out


def add_product(
    x: torch.Tensor,  # [T, K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None,  # [N]
    hidden: torch.Tensor,  # [T, N]
    *,
    residual_scale: float = 1.0,
) -> None:
    """hidden += residual_scale * (x W^T + b), in place."""
    _launch(x, None, weight, bias, hidden, 0.0, residual_scale, add=True)


def gated_product(
    x: torch.Tensor,  # [T, K]
    norm: torch.Tensor | None,  # [K] fp32
    gate_up: torch.Tensor,  # [2 F, K], gate above up
    bias: torch.Tensor | None,  # [2 F]
    eps: float,
    activation: str,
) -> torch.Tensor:
    """activation(gate) * up of norm(x) [gate | up]^T + b, by a name of `ACTIVATIONS`: [T, F]."""
    outputs = len(gate_up) // 2
    assert x.is_contiguous() and gate_up.is_contiguous()
    out = x.new_empty(len(x), outputs)
    grid, how = _tiles(len(x), outputs, x.dtype)
    kernels.gated_product[grid](
        x,
        gate_up,
        x if norm is None else norm,
        x if bias is None else bias,
        out,
        len(x),
        eps,
        INPUTS=x.shape[1],
        OUTPUTS=outputs,
        ACTIVATION=ACTIVATIONS[activation],
        NORM=norm is not None,
        BIAS=bias is not None,
        **how,
    )
    return out


def _launch(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    scale: float,
    *,
    add: bool,
) -> None:
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    grid, how = _tiles(len(x), len(weight), x.dtype)
    kernels.product[grid](
        x,
        weight,
        x if norm is None else norm,
        x if bias is None else bias,
        out,
        len(x),
        eps,
        scale,
        INPUTS=x.shape[1],
        OUTPUTS=len(weight),
        NORM=norm is not None,
        BIAS=bias is not None,
        ADD=add,
        **how,
    )


def _tiles(rows: int, outputs: int, dtype: torch.dtype) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and what each program takes: narrower ones where there would be too few of them."""
    columns = 64 if outputs >= 16384 else 32 if outputs >= 4096 else 16
    depth = 256 // dtype.itemsize  # 256 bytes of each weight row: whole cache lines
    taken = min(max(triton.next_power_of_2(rows), 16), FEW_ROWS)
    how = {"ROWS": taken, "COLUMNS": columns, "DEPTH": depth, "num_warps": 4, "num_stages": 4}
    return (triton.cdiv(outputs, columns), triton.cdiv(rows, taken)), how
