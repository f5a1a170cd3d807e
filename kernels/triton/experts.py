"""A mixture of experts, as a function of tensors."""

from dataclasses import dataclass

import torch
import triton

from rayfin.kernels.triton.device import expert_kernels as kernels
from rayfin.kernels.triton.device.activation import ACTIVATIONS

MAP_BLOCK = 1024
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ExpertTileShape:
    """How a grouped product is cut into programs."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FEW = ExpertTileShape(rows=16, columns=64, depth=64, warps=4, stages=4)
"""For weights that are read for a few rows each: the least that a tensor core multiplies."""

MANY = ExpertTileShape(rows=128, columns=64, depth=64, warps=8, stages=3)


def run_experts(
    x: torch.Tensor,  # [T, H]
    gate_up: torch.Tensor,  # [E, 2 F, H], gate above up
    down: torch.Tensor,  # [E, H, F]
    chosen: torch.Tensor,  # [T, K] int64; one that does not exist counts for nothing
    weights: torch.Tensor,  # [T, K]
    activation: str,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs [T, H], added up in the order of choices.

    Four launches, whatever was chosen, and nothing comes back to the host: the map of tiles is made
    on the device, for as many as there can be. ``activation`` is a name of `ACTIVATIONS`.
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
    """By the rows that an expert has on average: all that the host knows."""
    return FEW if assignments <= 32 * experts else MANY


def max_tiles_for(assignments: int, experts: int, rows: int) -> int:
    """Tiles that no choice of experts goes over: each expert's last may be filled with one row."""
    return (assignments + min(experts, assignments) * (rows - 1)) // rows
