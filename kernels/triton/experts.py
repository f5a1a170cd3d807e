"""Runs a mixture of experts."""

from dataclasses import dataclass

import torch
import triton

from rayfin.kernels.triton.device import expert_kernels as kernels
from rayfin.kernels.triton.device.activation import ACTIVATIONS

MAP_BLOCK = 1024
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ExpertTileShape:
    """The tile sizes of a grouped product."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FEW = ExpertTileShape(rows=16, columns=64, depth=64, warps=4, stages=4)
"""For few rows per expert: the smallest tile that a tensor core multiplies."""

MANY = ExpertTileShape(rows=128, columns=64, depth=64, warps=8, stages=3)


def run_experts(
    x: torch.Tensor,  # [T, H]
    gate_up: torch.Tensor,  # [E, 2 F, H], gate above up
    down: torch.Tensor,  # [E, H, F]
    chosen: torch.Tensor,  # [T, K] int64; ids that do not exist are ignored
    weights: torch.Tensor,  # [T, K]
    activation: str,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs [T, H], in the order of ``chosen``.

    It takes four launches and does not wait for the device: the tile map is computed there, for the
    largest possible number of tiles. ``activation`` is a name of `ACTIVATIONS`.
    """
    experts, hidden, intermediate = down.shape
    tokens, choices = chosen.shape
    assert gate_up.shape == (experts, 2 * intermediate, hidden), gate_up.shape
    assert gate_up.is_contiguous() and down.is_contiguous() and x.shape == (tokens, hidden)
    x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
    out, assignments = torch.empty_like(x), chosen.numel()
    if not assignments:
        return out.zero_()
    shape = shape_for(assignments, experts)
    max_tiles = max_tiles_for(assignments, experts, shape.rows)
    order = torch.empty(assignments, dtype=torch.int32, device=x.device)
    tiles = torch.empty(max_tiles, 3, dtype=torch.int32, device=x.device)
    kernels.map_tiles[(experts,)](
        chosen,
        order,
        tiles,
        assignments,
        max_tiles,
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts + 1),
        ROWS=shape.rows,
        BLOCK=MAP_BLOCK,
        num_warps=4,
    )
    sizes = {"HIDDEN": hidden, "INTERMEDIATE": intermediate}
    launch = {"ROWS": shape.rows, "COLUMNS": shape.columns, "DEPTH": shape.depth}
    launch |= {"num_warps": shape.warps, "num_stages": shape.stages}
    inner = x.new_empty(assignments, intermediate)
    kernels.gate_up_tiles[(triton.cdiv(intermediate, shape.columns), max_tiles)](
        *(x, gate_up, order, tiles, inner),
        CHOICES=choices,
        ACTIVATION=ACTIVATIONS[activation],
        **sizes,
        **launch,
    )
    parts = x.new_empty(assignments, hidden)
    kernels.down_tiles[(triton.cdiv(hidden, shape.columns), max_tiles)](
        *(inner, down, weights, order, tiles, parts), **sizes, **launch
    )
    kernels.add_choices[(tokens, triton.cdiv(hidden, SUM_BLOCK))](
        *(parts, chosen, out),
        CHOICES=choices,
        EXPERTS=experts,
        HIDDEN=hidden,
        BLOCK=SUM_BLOCK,
        num_warps=4,
    )
    return out


def shape_for(assignments: int, experts: int) -> ExpertTileShape:
    """The tile shape, by the average number of rows per expert."""
    return FEW if assignments <= 32 * experts else MANY


def max_tiles_for(assignments: int, experts: int, rows: int) -> int:
    """The largest possible number of tiles, if each expert's last tile has one row."""
    return (assignments + min(experts, assignments) * (rows - 1)) // rows
