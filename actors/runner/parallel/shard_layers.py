"""A rank's shares in the place of a model's layers, which have no weights yet."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.models.inspect_layers import is_experts
from rayfin.actors.runner.parallel.process_groups import ProcessGroups
from rayfin.actors.runner.parallel.shard_modules import (
    GatheredHead,
    RowParallel,
    SharedNorm,
    Summed,
)
from rayfin.actors.runner.parallel.shard_plans import (
    COLUMNS,
    EXPERTS,
    GATHERED,
    NORM,
    ROWS,
    SUMMED,
    UNSUMMED_EXPERTS,
    UNSUMMED_ROWS,
    Merged,
)
from rayfin.actors.runner.parallel.weight_slices import (
    DOWN,
    GATE_UP,
    Cuts,
    ExpertsSlice,
    MergedSlice,
    TransposedSlice,
    WeightSlice,
)


class LayerSharder:
    """Makes the shares; ``cuts`` says which parts of a checkpoint's tensors they are.

    Modules are to come before those that they are in.
    """

    def __init__(self, model: PreTrainedModel, peers: ProcessGroups) -> None:
        self.cuts: Cuts = {}
        self._model = model
        self._config: PretrainedConfig = model.config.get_text_config(decoder=True)
        self._peers = peers
        self._ways: dict[str, Callable[[Any, str], nn.Module | None]] = {
            COLUMNS: self._columns,
            ROWS: self._rows,
            UNSUMMED_ROWS: self._unsummed_rows,
            GATHERED: self._head,
            EXPERTS: self._experts,
            UNSUMMED_EXPERTS: self._unsummed_experts,
            SUMMED: self._summed,
            NORM: self._norm,
        }

    def cut(self, module: nn.Module, name: str, style: str | Merged) -> nn.Module | None:
        """What stands for the module on this rank; None: it is not what the style is for.

        Raises:
            InvalidConfig: it does not divide.
        """
        if isinstance(style, Merged):
            widths = [int(getattr(self._config, field)) for field in style.fields]
            return self._columns(module, name, widths)
        way = self._ways.get(style)
        return None if way is None else way(module, name)

    def divide(self, module: Any, fields: Sequence[str]) -> None:
        """This rank's share in attributes that count; a configuration becomes the module's own."""
        for path in fields:
            owner, _, field = path.rpartition(".")
            if owner:
                setattr(module, owner, copy.copy(getattr(module, owner)))
            counting = getattr(module, owner) if owner else module
            share = self._even(getattr(counting, field), 0, field)
            setattr(counting, field, share.stop - share.start)

    def slice(self, module: nn.Module, leaf: str, name: str, dim: int | str) -> None:
        """A parameter of a module that stays: its share in a dimension, or zeros but ``ONCE``."""
        parameter, place = module.get_parameter(leaf), self._peers.place
        shape = list(parameter.shape)
        if isinstance(dim, int):
            cut = self._even(shape[dim], dim, name)
            shape[dim] = cut.stop - cut.start
        else:
            start = 0 if place.tensor_rank == 0 else shape[0]
            cut = WeightSlice(0, start, start + shape[0], shape[0])
        self.cuts[name] = cut
        empty = torch.empty(shape, device="meta", dtype=parameter.dtype)
        setattr(module, leaf, nn.Parameter(empty))

    def _columns(self, linear: Any, name: str, widths: Sequence[int] = (1,)) -> nn.Module | None:
        """A share of each of the projections that lie side by side in one, as wide as that."""
        sizes = _sizes(linear)
        if sizes is None or sizes[1] % sum(widths):
            return None
        inputs, whole = sizes
        self.cuts[f"{name}.weight"] = self._weight_part(linear, 0, whole, name, widths)
        self.cuts[f"{name}.bias"] = self._part(0, whole, name, widths)
        outputs = whole // self._peers.place.tensor_size
        return _linear(linear, inputs, outputs, linear.bias is not None)

    def _rows(self, linear: Any, name: str) -> nn.Module | None:
        shard = self._share_of_rows(linear, name)
        return None if shard is None else RowParallel(shard, linear.bias, self._peers)

    def _unsummed_rows(self, linear: Any, name: str) -> nn.Module | None:
        shard = self._share_of_rows(linear, name)
        return shard if shard is not None and linear.bias is None else None

    def _share_of_rows(self, linear: Any, name: str) -> nn.Linear | None:
        sizes = _sizes(linear)
        if sizes is None:
            return None
        inputs, outputs = sizes
        self.cuts[f"{name}.weight"] = self._weight_part(linear, 1, inputs, name)
        return _linear(linear, inputs // self._peers.place.tensor_size, outputs, False)

    def _head(self, linear: Any, name: str) -> nn.Module | None:
        if type(linear) is not nn.Linear or name != "lm_head":
            return None
        vocab_size, place = linear.out_features, self._peers.place
        share = -(-vocab_size // place.tensor_size)
        start = share * place.tensor_rank
        cut = WeightSlice(0, start, start + share, vocab_size)
        self.cuts[f"{name}.weight"] = self.cuts[f"{name}.bias"] = cut
        shard = _linear(linear, linear.in_features, share, linear.bias is not None)
        return GatheredHead(shard, vocab_size, self._peers)

    def _experts(self, experts: Any, name: str) -> nn.Module | None:
        """Where there are a router and these experts only: none that all rows share."""
        mixture = self._model.get_submodule(name.rpartition(".")[0])
        if {child for child, _ in mixture.named_children()} != {"gate", "experts"}:
            return None
        shard = self._unsummed_experts(experts, name)
        return None if shard is None else Summed(shard, self._peers)

    def _unsummed_experts(self, experts: Any, name: str) -> nn.Module | None:
        if not is_experts(experts):
            return None
        count, hidden, width = experts.down_proj.shape
        own = self._even(width, 2, name)
        cut = ExpertsSlice(own.start, own.stop, width)
        self.cuts[f"{name}.{GATE_UP}"] = self.cuts[f"{name}.{DOWN}"] = cut
        share, dtype = own.stop - own.start, experts.down_proj.dtype
        gate_up = torch.empty(count, 2 * share, hidden, device="meta", dtype=dtype)
        experts.gate_up_proj = nn.Parameter(gate_up)
        down = torch.empty(count, hidden, share, device="meta", dtype=dtype)
        experts.down_proj = nn.Parameter(down)
        return experts  # type: ignore[no-any-return]

    def _norm(self, norm: Any, name: str) -> nn.Module | None:
        eps, parameters = getattr(norm, "variance_epsilon", None), dict(norm.named_parameters())
        if not isinstance(eps, float) or set(parameters) != {"weight"} or norm.weight.dim() != 1:
            return None
        whole, dtype = len(norm.weight), norm.weight.dtype
        own = self.cuts[f"{name}.weight"] = self._even(whole, 0, name)
        weight = torch.empty(own.stop - own.start, device="meta", dtype=dtype)
        return SharedNorm(nn.Parameter(weight), eps, whole, self._peers)

    def _summed(self, module: nn.Module, _: str) -> nn.Module:
        return Summed(module, self._peers)

    def _weight_part(
        self, linear: nn.Module, dim: int, whole: int, name: str, widths: Sequence[int] = (1,)
    ) -> WeightSlice | MergedSlice | TransposedSlice:
        """Of a weight [outputs, inputs], which a ``Conv1D`` keeps as [inputs, outputs]."""
        if isinstance(linear, Conv1D):
            return TransposedSlice(self._part(1 - dim, whole, name, widths))
        return self._part(dim, whole, name, widths)

    def _part(
        self, dim: int, whole: int, name: str, widths: Sequence[int] = (1,)
    ) -> WeightSlice | MergedSlice:
        parts, first = list[WeightSlice](), 0
        for width in widths:
            own = whole // sum(widths) * width
            part = self._even(own, dim, name)
            parts.append(WeightSlice(dim, first + part.start, first + part.stop, whole))
            first += own
        return parts[0] if len(parts) == 1 else MergedSlice(tuple(parts))

    def _even(self, whole: int, dim: int, name: str) -> WeightSlice:
        size, rank = self._peers.place.tensor_size, self._peers.place.tensor_rank
        if whole % size:
            raise InvalidConfig(
                f"tensor_parallel_size ({size}) does not divide {name} ({whole})",
                "tensor_parallel_size",
            )
        share = whole // size
        return WeightSlice(dim, share * rank, share * (rank + 1), whole)


def _sizes(linear: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer; None: it is something else."""
    if type(linear) is nn.Linear:
        return linear.in_features, linear.out_features
    if type(linear) is Conv1D:
        return linear.nx, linear.nf
    return None


def _linear(like: Any, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias, device="meta", dtype=like.weight.dtype)
