"""Runs a mixture of experts, of plain weights or of codes, and chooses those of a row."""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from rayfin.kernels.cpu.experts import ClampedSwish, ExpertBiases
from rayfin.kernels.shapes import Routing
from rayfin.kernels.triton.device import expert_kernels as kernels
from rayfin.kernels.triton.device import router_kernels
from rayfin.kernels.triton.device.activation import ACTIVATIONS, CLAMPED_SWISH
from rayfin.kernels.triton.quantized import CodedWeight, block_constants, has_ptx

SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class MapSizes:
    """The sizes of programs that sort assignments by expert."""

    most_read: int = (
        4096  # assignments that each program reads; more are counted by a launch before
    )
    small_share: int = 32  # assignments of a program, where all are read
    share: int = 1024
    block: int = 256
    sorted: int = 32
    at_once: int = 16

    def constants(self, experts: int, *, counted: bool) -> dict[str, Any]:
        """Returns what the kernels know of them."""
        share = self.share if counted else self.small_share
        return {"EXPERTS": experts, "BINS": triton.next_power_of_2(experts + 1), "SHARE": share}


MAP_SIZES = MapSizes()


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

MOST_FEW_ROWS = 32
"""Rows per expert, on the average, up to which tiles are of few rows."""

CODED_FEW = ExpertTileShape(rows=16, columns=64, depth=128, warps=4, stages=4)
"""The same for weights of codes. Their columns are the rows of the tensor cores' tile."""

CODED_MANY = ExpertTileShape(rows=64, columns=64, depth=128, warps=8, stages=3)


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The weights of E experts, and what they compute: down(act(gate(x)) * up(x)).

    Both weights are plain, or both are of codes in the order of `coded_columns`.
    """

    gate_up: torch.Tensor | CodedWeight  # [E, 2, F, H] in any strides; codes: [E * 2 F, H]
    down: torch.Tensor | CodedWeight  # [E, H, F] in any strides; codes: [E * H, F]
    activation: str | ClampedSwish  # a name of `ACTIVATIONS`
    biases: ExpertBiases | None = None


def run_experts(
    x: torch.Tensor,  # [T, H]
    experts: Experts,
    chosen: torch.Tensor,  # [T, K] int64; ids that do not exist are ignored
    weights: torch.Tensor,  # [T, K]
    slots: torch.Tensor | None = None,  # [T] int64, negative in rows that choose nothing
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs [T, H], in the order of ``chosen``.

    It takes four launches, or five, and does not wait for the device: the tile map is computed
    there, for the largest possible number of tiles.
    """
    (tokens, choices), hidden = chosen.shape, x.shape[1]
    count, intermediate = _sizes(experts, hidden)
    x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
    out, assignments = torch.empty_like(x), chosen.numel()
    if not assignments:
        return out.zero_()
    shape = shape_for(assignments, count, coded=isinstance(experts.down, CodedWeight))
    order, tiles = map_assignments(chosen, slots, count, shape.rows)
    inner = x.new_empty(assignments, intermediate)
    parts = x.new_empty(assignments, hidden)
    constants = gate_constants(experts) | {"CHOICES": choices, "INTERMEDIATE": intermediate}
    biases = experts.biases
    gate_up_bias, down_bias = (x, x) if biases is None else (biases.gate_up, biases.down)
    shared: dict[str, Any] = {"BIAS": biases is not None}
    shared |= {"ROWS": shape.rows, "COLUMNS": shape.columns, "num_warps": shape.warps}
    first = (triton.cdiv(intermediate, shape.columns), len(tiles))
    last = (triton.cdiv(hidden, shape.columns), len(tiles))
    gate_up, down = experts.gate_up, experts.down
    if isinstance(gate_up, CodedWeight) and isinstance(down, CodedWeight):
        assert x.dtype.itemsize == 2 and gate_up.order is down.order is None
        shared |= {"STAGES": shape.stages, "PAIRS": has_ptx(x.device)}
        kernels.coded_gate_up_tiles[first](
            *(x, *_codes(gate_up), gate_up_bias, order, tiles, inner),
            **(constants | shared | weight_constants(gate_up)),
        )
        kernels.coded_down_tiles[last](
            *(inner, *_codes(down), down_bias, weights, order, tiles, parts),
            HIDDEN=hidden,
            **(shared | weight_constants(down)),
        )
    else:
        shared |= {"HIDDEN": hidden, "DEPTH": shape.depth, "num_stages": shape.stages}
        kernels.gate_up_tiles[first](
            *(x, gate_up, gate_up_bias, order, tiles, inner),
            **(constants | shared | weight_constants(gate_up)),
        )
        kernels.down_tiles[last](
            *(inner, down, down_bias, weights, order, tiles, parts),
            INTERMEDIATE=intermediate,
            **(shared | weight_constants(down)),
        )
    kernels.add_choices[(tokens, triton.cdiv(hidden, SUM_BLOCK))](
        *(parts, chosen, chosen if slots is None else slots, out),
        CHOICES=choices,
        MASKED=slots is not None,
        EXPERTS=count,
        HIDDEN=hidden,
        BLOCK=SUM_BLOCK,
        num_warps=4,
    )
    return out


def choose_experts(
    logits: torch.Tensor,  # [T, E]
    correction: torch.Tensor | None,  # [E], added to scores for the choice alone
    routing: Routing,
    dtype: torch.dtype,  # of shares
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares [T, K] of a row's experts and their ids [T, K] int64, in one launch."""
    (rows, count), choices = logits.shape, routing.choices
    chosen = torch.empty(rows, choices, dtype=torch.int64, device=logits.device)
    shares = torch.empty(rows, choices, dtype=dtype, device=logits.device)
    if rows:
        router_kernels.choose_experts[(rows,)](
            logits.contiguous(),
            logits if correction is None else correction,
            chosen,
            shares,
            routing.scale,
            CORRECTED=correction is not None,
            **routing_constants(routing, count),
            num_warps=1,
        )
    return shares, chosen


def routing_constants(routing: Routing, count: int) -> dict[str, int | bool]:
    """Returns what the kernel knows of a router of ``count`` experts."""
    return {
        "SIGMOID": routing.sigmoid,
        "NORMED": routing.normed,
        "PAIRS": routing.pairs,
        "EXPERTS": count,
        "CHOICES": routing.choices,
        "GROUPS": routing.groups,
        "KEPT": routing.kept,
        "GROUPS_WIDTH": triton.next_power_of_2(routing.groups),
        "WIDTH": triton.next_power_of_2(count // routing.groups),
        "CHOICES_WIDTH": triton.next_power_of_2(routing.choices),
    }


def map_assignments(
    chosen: torch.Tensor,  # [T, K] int64
    slots: torch.Tensor | None,  # [T] int64, negative in rows that choose nothing
    experts: int,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts the assignments of rows to experts, stably, and cuts them into tiles of ``rows``.

    Returns:
        The assignments [T * K] int32 in order, and the tiles [N, 3] int32: expert (-1: no tile),
        first place in the order, number of assignments.
    """
    sizes, assignments = MAP_SIZES, chosen.numel()
    counted = assignments > sizes.most_read
    constants = sizes.constants(experts, counted=counted)
    constants |= {"CHOICES": chosen.shape[1], "MASKED": slots is not None, "num_warps": 4}
    where: dict[str, Any] = {"dtype": torch.int32, "device": chosen.device}
    order = torch.empty(assignments, **where)
    max_tiles = max_tiles_for(assignments, experts, rows)
    tiles = torch.empty(max_tiles, 3, **where)
    read, grid = chosen if slots is None else slots, (triton.cdiv(assignments, constants["SHARE"]),)
    counts = order
    if counted:
        counts = torch.empty(*grid, constants["BINS"], **where)
        kernels.count_assignments[grid](chosen, read, counts, assignments, **constants)
    kernels.map_tiles[grid](
        *(chosen, read, counts, order, tiles, assignments, max_tiles),
        **constants,
        COUNTED=counted,
        ROWS=rows,
        BLOCK=sizes.block,
        SORTED=sizes.sorted,
        AT_ONCE=sizes.at_once,
    )
    return order, tiles


def _sizes(experts: Experts, hidden: int) -> tuple[int, int]:
    """Returns the number of experts and their inner width."""
    gate_up, down = experts.gate_up, experts.down
    if isinstance(gate_up, CodedWeight) and isinstance(down, CodedWeight):
        count, intermediate = down.outputs // hidden, down.inputs
        wanted: tuple[int, ...] = (2 * count * intermediate, hidden)
        assert (gate_up.outputs, gate_up.inputs) == wanted and gate_up.parted and down.parted
        return count, intermediate
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    count, _, intermediate = down.shape
    assert down.shape[1] == hidden and gate_up.shape == (count, 2, intermediate, hidden)
    return count, intermediate


def gate_constants(experts: Experts) -> dict[str, Any]:
    """Returns what the kernels know of the activation."""
    act = experts.activation
    if isinstance(act, ClampedSwish):
        return {"ACTIVATION": CLAMPED_SWISH.value, "SLOPE": act.slope, "LIMIT": act.limit}
    return {"ACTIVATION": ACTIVATIONS[act], "SLOPE": 1.0, "LIMIT": 0.0}


def weight_constants(weight: torch.Tensor | CodedWeight) -> dict[str, Any]:
    """Returns what the kernels know of a weight."""
    if isinstance(weight, CodedWeight):
        return {**block_constants(weight), "ROW_CODES": 2 * weight.words.shape[1]}
    expert, *up, outputs, inputs = weight.stride()
    strides = {"EXPERT_STRIDE": expert, "OUTPUT_STRIDE": outputs, "INPUT_STRIDE": inputs}
    return strides | ({"UP_STRIDE": up[0]} if up else {})


def _codes(weight: CodedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    zeros = weight.groups if weight.zeros is None else weight.zeros
    return weight.words.view(torch.int16), weight.groups, zeros


def shape_for(assignments: int, experts: int, *, coded: bool = False) -> ExpertTileShape:
    """The tile shape, by the average number of rows per expert."""
    few = assignments <= MOST_FEW_ROWS * experts
    if coded:
        return CODED_FEW if few else CODED_MANY
    return FEW if few else MANY


def max_tiles_for(assignments: int, experts: int, rows: int) -> int:
    """The largest possible number of tiles, if each expert's last tile has one row."""
    return (assignments + min(experts, assignments) * (rows - 1)) // rows
