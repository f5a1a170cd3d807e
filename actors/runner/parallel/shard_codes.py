"""Puts a rank's share of the layers that a checkpoint has in codes into a sharded model.

Codes stay codes. A share of a layer's outputs has its rows of codes, scales and zero points, one of
its inputs its columns. Where the inputs have an order of their own (GPTQ's ``desc_act``), a share
has whole groups, whose inputs lie anywhere: a rank then gathers the row of all ranks. Experts have
their inner width in that order, expert by expert, so they gather nothing.
"""

import logging

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.parallel.plans import (
    DOWN,
    AnyCut,
    Cuts,
    ExpertsSlice,
    MergedSlice,
    TransposedSlice,
    WeightSlice,
)
from rayfin.actors.runner.parallel.shard_model import checkpoint_name
from rayfin.actors.runner.quantized.experts import Expert, QuantExperts, StoredLayer
from rayfin.actors.runner.quantized.loader import StoredCodes, quant_linears
from rayfin.actors.runner.quantized.mxfp4 import coded_experts
from rayfin.actors.runner.quantized.share import (
    InputsOf,
    OutputsOf,
    SharedLinear,
    group_within,
)

logger = logging.getLogger(__name__)


class OrderedInputs(nn.Module):
    """A layer whose inputs on this rank are some of those of all ranks, in an order of their own.

    Args:
        shard: multiplies these inputs.
        places: their numbers [K / ranks] int64 in the row of all ranks.
    """

    def __init__(self, shard: nn.Module, places: torch.Tensor, peers: ProcessGroups) -> None:
        super().__init__()
        self.shard = shard
        self._places = places
        self._peers = peers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K / ranks] -> [..., N]."""
        y: torch.Tensor = self.shard(self._peers.concatenate(x)[..., self._places])
        return y


def place_codes(
    model: PreTrainedModel, cuts: Cuts, stored: StoredCodes, peers: ProcessGroups
) -> None:
    """Replaces the layers and experts that are stored in codes, in place."""
    dtype = model.dtype
    for path, module in list(model.named_modules()):
        name = checkpoint_name(f"{path}.weight").removesuffix(".weight")
        if name in stored.linear and type(module) in (nn.Linear, Conv1D):
            cut = cuts.get(f"{name}.weight")
            model.set_submodule(path, _linear(stored.linear[name], cut, module, peers))
        elif name in stored.experts and DOWN in module._parameters:
            cut = cuts.get(f"{name}.{DOWN}")
            model.set_submodule(path, _experts(stored.experts[name], cut, module, dtype, peers))


def widen_small_groups(model: nn.Module, size: int) -> None:
    """Makes the layers plain whose codes are not worth it: ``size`` ranks cut groups to bits."""
    cut = [
        (owner, name, layer)
        for owner, name, layer in quant_linears(model)
        if isinstance(layer, SharedLinear) and layer.cut_group is not None
    ]
    plain = [entry for entry in cut if not entry[2].is_worth_codes]
    for owner, name, layer in plain:
        setattr(owner, name, layer.dequantized())
    if len(cut) > len(plain):
        small = next(layer for _, _, layer in cut if layer.is_worth_codes)
        logger.info(
            "%d layers, %s among them, have groups of %d inputs instead of %d: ranks cut them",
            *(len(cut) - len(plain), small.name, small.cut_group, small.format.group),
        )
    if plain:
        first = plain[0][2]
        logger.warning(
            "%d layers, %s among them, are plain: %d ranks cut their groups of %s inputs into such "
            "of %d. tensor_parallel_size %d leaves them whole",
            *(len(plain), first.name, size, first.format.group, first.cut_group),
            whole_groups(first.in_features * size, first.format.width(1), size),
        )


def whole_groups(inputs: int, group: int, size: int) -> int:
    """The largest divisor of ``size`` whose shares of the inputs are whole groups, or 1."""
    fitting = (n for n in range(size, 0, -1) if size % n == 0 and inputs % (n * group) == 0)
    return next(fitting, 1)


def _linear(
    layer: StoredLayer, cut: AnyCut | None, module: nn.Module, peers: ProcessGroups
) -> nn.Module:
    """What takes the place of ``module``, which has the share's sizes."""
    weight, bias = module.get_parameter("weight"), module._parameters["bias"]
    stored, dtype = (layer.name, layer.format), weight.dtype
    if cut is None:
        return SharedLinear(*stored, layer, bias, dtype)
    dim, runs = _runs(cut)
    if dim == 0:
        return SharedLinear(*stored, OutputsOf(layer, runs, len(weight)), bias, dtype)
    (run,) = runs
    share = SharedLinear(
        *stored, InputsOf(layer, run), bias, dtype, cut_group=_cut_group(layer, run)
    )
    if (order := layer.order()) is None:
        return share
    return OrderedInputs(share, order[run.start : run.stop], peers)


def _cut_group(layer: StoredLayer, run: range) -> int | None:
    """The size of the groups that a rank has, if its share cuts some of several."""
    if (group := layer.format.group) is None:
        return None
    size = group_within(group, layer.inputs, run)
    return size if size < min(group, len(run)) else None


def _runs(cut: AnyCut) -> tuple[int, tuple[range, ...]]:
    """The dimension of a weight [outputs, inputs] that is cut, and the rank's part of it."""
    is_turned = isinstance(cut, TransposedSlice)
    part = cut.of if isinstance(cut, TransposedSlice) else cut
    assert isinstance(part, WeightSlice | MergedSlice)
    parts = part.parts if isinstance(part, MergedSlice) else (part,)
    dim = parts[0].dim
    runs = tuple(range(min(one.start, one.whole), min(one.stop, one.whole)) for one in parts)
    return 1 - dim if is_turned else dim, runs


def _experts(
    experts: list[Expert],
    cut: AnyCut | None,
    module: nn.Module,
    dtype: torch.dtype,
    peers: ProcessGroups,
) -> QuantExperts:
    if cut is not None:
        assert isinstance(cut, WeightSlice | ExpertsSlice)
        run = range(cut.start, cut.stop)
        experts = [_expert(one, run) for one in experts]
    return coded_experts(module, experts, dtype, peers.device)


def _expert(expert: Expert, run: range) -> Expert:
    """Some of the inner width, counted in the order of the down projection's groups."""
    order = expert.down.order() if isinstance(expert.down, StoredLayer) else None
    rows = (run,) if order is None else order[run.start : run.stop]
    gate, up = (OutputsOf(one, rows, len(run)) for one in (expert.gate, expert.up))
    return Expert(gate, up, InputsOf(expert.down, run))
