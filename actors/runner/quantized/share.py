"""A rank's share of a layer in codes: some of its outputs, or some of its inputs.

Where words of codes, groups and blocks end with the share, nothing else is read. Other layers are
unpacked as a whole, one after the other, and the share is cut out of the codes.
"""

import math
from dataclasses import dataclass, replace

import torch

from rayfin.actors.runner.quantized.experts import CodedProjection, StoredLayer
from rayfin.actors.runner.quantized.formats import E4M3, Format, Part
from rayfin.actors.runner.quantized.linear import QuantLinear
from rayfin.actors.runner.quantized.mxfp4 import Mxfp4Layer
from rayfin.kernels.grouped import Grouped

LEAST_GROUP = 8
"""Inputs of a group. The scales of smaller ones take about as much memory as plain weights."""

Rows = tuple[range, ...] | torch.Tensor
"""Outputs, one run behind the other or by their numbers."""


@dataclass(frozen=True, slots=True)
class OutputsOf:
    """Some outputs of a layer; if there are fewer than ``outputs``, the rest is zeros."""

    layer: CodedProjection
    rows: Rows
    outputs: int

    @property
    def inputs(self) -> int:
        return self.layer.inputs

    def grouped(self) -> Grouped:
        """The weight [outputs, inputs]."""
        rows = self.rows
        if not isinstance(rows, torch.Tensor) and [self.outputs] == [len(run) for run in rows]:
            if (part := _part(self.layer, Part(0, rows[0]))) is not None:
                return part
        return some_outputs(self.layer.grouped(), self.rows, self.outputs)


@dataclass(frozen=True, slots=True)
class InputsOf:
    """Some inputs of a layer, counted in the order of its groups."""

    layer: CodedProjection
    run: range

    @property
    def outputs(self) -> int:
        return self.layer.outputs

    @property
    def inputs(self) -> int:
        return len(self.run)

    def grouped(self) -> Grouped:
        """The weight [outputs, inputs], without an order of inputs."""
        part = _part(self.layer, Part(1, self.run))
        return some_inputs(self.layer.grouped(), self.run) if part is None else part


class SharedLinear(QuantLinear):
    """A layer, or a share of it, that stays in the files until it is packed.

    Args:
        cut_group: the size of its groups, if the share cuts those of the layer.
    """

    def __init__(
        self,
        name: str,
        format: Format,
        layer: CodedProjection,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        cut_group: int | None = None,
    ) -> None:
        super().__init__(name, layer.outputs, layer.inputs, format, {}, bias, dtype)
        self.cut_group = cut_group
        self._layer = layer

    @property
    def is_worth_codes(self) -> bool:
        """Whether codes and scales are much smaller than plain weights."""
        return self.cut_group is None or self.cut_group >= LEAST_GROUP

    def grouped(self) -> Grouped:
        """The weight [outputs, inputs], read out of the files."""
        return self._layer.grouped()


def _part(layer: CodedProjection, part: Part) -> Grouped | None:
    """A part that is read by itself, or None."""
    return layer.part(part) if isinstance(layer, StoredLayer | Mxfp4Layer) else None


def some_outputs(weight: Grouped, rows: Rows, count: int) -> Grouped:
    """``count`` outputs of a weight; those beyond ``rows`` are zeros."""

    def taken(of: torch.Tensor) -> torch.Tensor:
        octets = of.view(torch.uint8) if of.dtype == E4M3 else of
        if isinstance(rows, torch.Tensor):
            kept = octets[rows.to(of.device)]
        else:
            runs = [octets[run.start : run.stop] for run in rows]
            kept = runs[0] if len(runs) == 1 else torch.cat(runs)
        if len(kept) < count:
            kept = torch.cat([kept, kept.new_zeros(count - len(kept), kept.shape[1])])
        return kept.contiguous().view(of.dtype)

    zero, least = (
        None if tensor is None else taken(tensor) for tensor in (weight.zero, weight.least)
    )
    values, scale = taken(weight.values), taken(weight.scale)
    return replace(weight, values=values, scale=scale, zero=zero, least=least, shared=None)


def some_inputs(weight: Grouped, run: range) -> Grouped:
    """The inputs ``run`` of a weight, counted in its order; they have no order of their own.

    Where an end of the run lies within a group, groups become smaller ones of the same scale.
    """
    group = group_within(weight.group, weight.shape[1], run)
    places = torch.arange(run.start, run.stop, group, device=weight.scale.device) // weight.group
    return replace(
        weight,
        values=weight.values[:, run.start : run.stop].contiguous(),
        scale=weight.scale[:, places].contiguous(),
        group=group,
        zero=None if weight.zero is None else weight.zero[:, places].contiguous(),
        least=None if weight.least is None else weight.least[:, places].contiguous(),
        shared=None,
        order=None,
    )


def group_within(group: int, inputs: int, run: range) -> int:
    """The size of groups in a run of the inputs: each has inputs of one group of the layer."""
    if run.start // group == (run.stop - 1) // group:
        return len(run)
    return math.gcd(group, run.start, 0 if run.stop == inputs else run.stop)
