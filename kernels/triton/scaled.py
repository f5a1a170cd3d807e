"""Products of rows and weights that are both fp8 (e4m3), by torch's own scaled product.

Rows are rounded with a scale for each, or for each 128 inputs of a row, as the scales of the
weight are: of outputs, or of blocks of 128 x 128.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton

from rayfin.kernels.triton.device import quant_kernels as kernels

DEPTH = 128
"""Inputs of a block."""

LARGEST = 448.0
LEAST = 1e-30
"""The largest number of e4m3, and what a row's largest counts as at least."""

LEAST_OUTPUTS = 16
"""What outputs with a scale each are a multiple of; those of blocks are whole blocks."""

ROWS_AT_ONCE = 16
"""Rows of a product are a multiple of this: a device wants it of the strides of their scales."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """A weight [N, K] for such products; its numbers are those of a ``CodedWeight``."""

    numbers: torch.Tensor  # [N, P] e4m3, in the order of `coded_columns`; P is K in whole blocks
    scales: torch.Tensor  # fp32 [1, N], or of blocks [P / 128 in fours, N / 128], turned
    by_block: bool


def scaled_product(x: torch.Tensor, weight: ScaledWeight) -> torch.Tensor:
    """Rounds rows [T, K] and multiplies: [T, N] in the dtype of x."""
    codes, scales = round_rows(x, weight.numbers.shape[1], weight.by_block)
    kinds = F.ScalingType
    of_rows, of_weight = kinds.RowWise, kinds.RowWise
    if weight.by_block:
        of_rows, of_weight = kinds.BlockWise1x128, kinds.BlockWise128x128
    y = F.scaled_mm(
        *(codes, weight.numbers.T, scales, of_rows, weight.scales, of_weight),
        output_dtype=x.dtype,
    )
    return y[: len(x)]


def round_rows(
    x: torch.Tensor,  # [T, K]
    padded: int,
    by_block: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds rows to e4m3 [R, padded] in the order of ``ScaledWeight``, with scales in fp32.

    R is T or more; the rows behind are zeros. Scales are [R, 1], or [R, padded / 128] of blocks,
    of which those of successive rows lie side by side.
    """
    rows, blocks = -(-len(x) // ROWS_AT_ONCE) * ROWS_AT_ONCE, padded // DEPTH
    out = torch.empty(rows, padded, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(blocks if by_block else 1, rows, device=x.device)
    width = triton.next_power_of_2(blocks)
    kernels.round_rows[(rows,)](
        x.contiguous(),
        out,
        scales,
        len(x),
        rows,
        INPUTS=x.shape[1],
        BLOCKS=blocks,
        WIDTH=width,
        DEPTH=DEPTH,
        BY_BLOCK=by_block,
        num_warps=warps_for(width),
    )
    return out, scales.T if by_block else scales.view(rows, 1)


def warps_for(width: int) -> int:
    """Returns the warps for a row of so many blocks: each thread has 32 to 64 numbers."""
    return min(max(width // 8, 4), 16)


def rounded_rows(x: torch.Tensor, by_block: bool) -> torch.Tensor:
    """Rounds rows [T, K] and widens them to float32, without kernels: the reference."""
    inputs = x.shape[1]
    padded = F.pad(x.float(), (0, -inputs % DEPTH))
    parts = padded.view(len(x), -1, DEPTH if by_block else padded.shape[1])
    largest = parts.abs().amax(dim=2, keepdim=True).clamp(min=LEAST)
    # Not ``LARGEST / largest``, of which torch makes a reciprocal that is rounded first.
    factor = torch.full_like(largest, LARGEST) / largest
    numbers = (parts * factor).to(torch.float8_e4m3fn).float()
    return (numbers * (largest / LARGEST)).flatten(1)[:, :inputs]


def scales_of(outputs: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
    """Lays out the scales of a ``ScaledWeight``, and says whether they are of blocks.

    Args:
        outputs: those of each output and block of 128 inputs [G, N] fp32; G is 1 if an output has
            one scale.

    Returns:
        None if the outputs of a block have several, or are too few for torch's product.
    """
    groups, count = outputs.shape
    if count % (LEAST_OUTPUTS if groups == 1 else DEPTH):
        return None
    if groups == 1:
        return outputs.contiguous(), False
    blocks = outputs[:, ::DEPTH]
    if not torch.equal(blocks.repeat_interleave(DEPTH, dim=1), outputs):
        return None
    return F.pad(blocks.T, (0, -groups % 4), value=1.0).contiguous().T, True
