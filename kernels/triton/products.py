"""Matrix products of few rows, fused with the operations around them.

They are for decode rows, where a launch costs as much as a small product. For more rows torch's
product is faster, and the next kernel does the rest (`layers`). ``pdl`` is `pdl.launch_options`'.
Those of more than `FEW_ROWS` rows are on tensor cores (`mma_kernels`), of which no GPU has timed
one: decoders ask for them if `trials` say so.
"""

from typing import Any

import torch
import triton

from rayfin.kernels.triton.device import row_kernels as kernels
from rayfin.kernels.triton.device.activation import ACTIVATIONS
from rayfin.kernels.triton.device.mma_kernels import mma_product
from rayfin.kernels.triton.pdl import launch_options
from rayfin.kernels.triton.trials import SIXTEEN_ROWS, trials

FEW_ROWS = 4
"""Rows that products without tensor cores take at most."""

MMA_ROWS = 16
"""Rows that those on tensor cores take at most."""

MMA_WARPS = 16
"""Of a program; each multiplies a part of a block of inputs."""

MMA_BLOCK, MMA_COLUMNS = 1024, 16
"""Inputs and columns of a block of weights. A program has all its blocks in registers."""

WIDEST_MMA_ROW = 4096
"""Inputs of the widest weight of those on tensor cores."""

NARROW = 2048
"""The largest hidden size of models whose ``FEW_ROWS`` rows are faster here than with torch."""

FEW_WIDE_ROWS = 2
"""Rows at most of wider models: with three or more torch is faster there."""

WIDEST_ROW = 8192
"""Inputs of the widest weight whose rows a program holds as a whole."""

WEIGHTS_AT_ONCE = 16384
"""Bytes of weights that a program has on their way."""


def few_rows(hidden: int) -> int:
    """Rows up to which a model of a hidden size is faster with these products than with torch's.

    Measured on an H200 (``benchmarks/gpu.py --sections kernels``) at 1024 and 4096.
    """
    if hidden > WIDEST_ROW:
        return 0
    if hidden > NARROW:
        return FEW_WIDE_ROWS
    return MMA_ROWS if SIXTEEN_ROWS in trials() else FEW_ROWS


def widest_row(rows: int) -> int:
    """Returns the most inputs that products of so many rows take."""
    return WIDEST_MMA_ROW if _on_tensor_cores(rows) else WIDEST_ROW


def _on_tensor_cores(rows: int) -> bool:
    return FEW_ROWS < rows <= MMA_ROWS


def product(
    x: torch.Tensor,  # [T, K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None,  # [N]
    *,
    gain: float | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> torch.Tensor:
    """y W^T + b: [T, N]. With a ``gain`` y = gain * x / rms(x), a norm without weights."""
    out = x.new_empty(len(x), len(weight))
    _launch(x, weight, bias, out, gain, eps, 1.0, add=False, pdl=pdl)
    return out


def add_product(
    x: torch.Tensor,  # [T, K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None,  # [N]
    hidden: torch.Tensor,  # [T, N]
    *,
    residual_scale: float = 1.0,
    pdl: bool = False,
) -> None:
    """hidden += residual_scale * (x W^T + b), in place."""
    _launch(x, weight, bias, hidden, None, 0.0, residual_scale, add=True, pdl=pdl)


def gated_product(
    x: torch.Tensor,  # [T, K]
    gate_up: torch.Tensor,  # [2 F, K], gate above up
    bias: torch.Tensor | None,  # [2 F]
    activation: str,
    *,
    gain: float | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> torch.Tensor:
    """activation(gate) * up of y [gate | up]^T + b, by a name of `ACTIVATIONS`: [T, F].

    y is that of `product`.
    """
    outputs = len(gate_up) // 2
    assert x.is_contiguous() and gate_up.is_contiguous()
    out = x.new_empty(len(x), outputs)
    if _on_tensor_cores(len(x)):
        gated = ACTIVATIONS[activation]
        _launch_mma(x, gate_up, bias, out, gain, eps, 1.0, add=False, gated=gated, pdl=pdl)
        return out
    grid, launch = _programs(len(x), outputs, x.shape[1], x.dtype, 2)
    kernels.gated_product[grid](
        x,
        gate_up,
        x if bias is None else bias,
        out,
        len(x),
        eps,
        1.0 if gain is None else gain,
        INPUTS=x.shape[1],
        OUTPUTS=outputs,
        ACTIVATION=ACTIVATIONS[activation],
        NORM=gain is not None,
        BIAS=bias is not None,
        **launch,
        **launch_options(pdl),
    )
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gain: float | None,
    eps: float,
    scale: float,
    *,
    add: bool,
    pdl: bool,
) -> None:
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    if _on_tensor_cores(len(x)):
        _launch_mma(x, weight, bias, out, gain, eps, scale, add=add, pdl=pdl)
        return
    grid, launch = _programs(len(x), len(weight), x.shape[1], x.dtype)
    kernels.product[grid](
        x,
        weight,
        x if bias is None else bias,
        out,
        len(x),
        eps,
        1.0 if gain is None else gain,
        scale,
        INPUTS=x.shape[1],
        OUTPUTS=len(weight),
        NORM=gain is not None,
        BIAS=bias is not None,
        ADD=add,
        **launch,
        **launch_options(pdl),
    )


def _launch_mma(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gain: float | None,
    eps: float,
    scale: float,
    *,
    add: bool,
    gated: int | None = None,
    pdl: bool,
) -> None:
    rows, inputs = x.shape
    assert inputs <= WIDEST_MMA_ROW
    mma_product[(triton.cdiv(len(weight), MMA_COLUMNS),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        rows,
        eps,
        1.0 if gain is None else gain,
        scale,
        INPUTS=inputs,
        OUTPUTS=out.shape[1],
        ACTIVATION=gated or 0,
        NORM=gain is not None,
        BIAS=bias is not None,
        ADD=add,
        GATED=gated is not None,
        **mma_sizes(rows, inputs),
        num_warps=MMA_WARPS,
        **launch_options(pdl),
    )


def mma_sizes(rows: int, inputs: int) -> dict[str, int]:
    """Returns the constants of `mma_product`."""
    sizes = {"ROWS": max(8, triton.next_power_of_2(rows)), "COLUMNS": MMA_COLUMNS}
    depth, blocks = MMA_BLOCK // MMA_WARPS, triton.cdiv(inputs, MMA_BLOCK)
    return sizes | {"PARTS": MMA_WARPS, "DEPTH": depth, "BLOCKS": blocks}


def _programs(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, matrices: int = 1
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid and sizes of programs that hold whole rows of ``matrices`` [N, K].

    Few outputs get few columns, which make programs for all multiprocessors.
    """
    width = triton.next_power_of_2(inputs)
    held = WEIGHTS_AT_ONCE // (dtype.itemsize * matrices * width)
    spread = triton.next_power_of_2(outputs // 256 + 1) // 2
    columns = max(min(held, spread, 8), 1)
    launch = {"ROWS": triton.next_power_of_2(rows), "COLUMNS": columns, "WIDTH": width}
    warps = 4 if width <= WIDEST_ROW // 2 else 8
    return (triton.cdiv(outputs, columns),), launch | {"num_warps": warps}
