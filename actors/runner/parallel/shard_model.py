"""Shards a model for one rank of a group, before it has weights.

Tensor parallel (Megatron-LM): by the plan of the model's family (``plans.py``) the first linear
layers of attention and MLP keep a share of their outputs and the following ones a share of their
inputs, whose results are summed over the ranks, twice per layer. The head has a share of the
vocabulary; embedding and norms are whole on each rank.

Pipeline parallel (GPipe): a stage keeps consecutive layers. The other layers are replaced by
modules that receive, pass on and send hidden states, so that the model's forward runs unchanged.
"""

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.runner.models.inspect_layers import is_experts
from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.parallel.plans import (
    COLUMNS,
    DOWN,
    EXPERTS,
    GATE_UP,
    GATHERED,
    NORM,
    ROWS,
    SUMMED,
    UNSUMMED_EXPERTS,
    UNSUMMED_ROWS,
    WHOLE,
    Cuts,
    ExpertsSlice,
    Merged,
    MergedSlice,
    ShardPlan,
    TransposedSlice,
    WeightSlice,
    plan_of,
)
from rayfin.actors.runner.parallel.rank import ParallelRank

SHARD = "shard"  # the name of a wrapped module in its wrapper


class Summed(nn.Module):
    """Sums the outputs of a module over the ranks."""

    def __init__(self, shard: nn.Module, peers: ProcessGroups) -> None:
        super().__init__()
        self.shard = shard
        self._peers = peers

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """The sum, in the shape of the shard's output."""
        return self._peers.sum(self.shard(*inputs, **named))


class RowParallel(nn.Module):
    """y = sum over ranks of x_r W_r^T, + b."""

    def __init__(self, shard: nn.Linear, bias: nn.Parameter | None, peers: ProcessGroups) -> None:
        super().__init__()
        self.shard = shard
        self.bias = bias
        self._peers = peers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K / ranks] -> [..., N]."""
        y = self._peers.sum(self.shard(x))
        return y if self.bias is None else y + self.bias


class SharedNorm(nn.Module):
    """An RMS norm over the columns of all ranks; each rank scales its share.

    Args:
        weight: this rank's share, [N / ranks].
        whole: N.
    """

    def __init__(self, weight: nn.Parameter, eps: float, whole: int, peers: ProcessGroups) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps
        self._whole = whole
        self._peers = peers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N / ranks] -> the same shape and dtype, computed in float32."""
        x32 = x.float()
        squares = self._peers.sum(x32.square().sum(-1, keepdim=True))
        scaled = x32 * torch.rsqrt(squares / self._whole + self._eps)
        return (self.weight * scaled).to(x.dtype)


class GatheredHead(nn.Module):
    """Computes a share of the vocabulary on each rank and gathers all logits on all ranks."""

    def __init__(self, shard: nn.Linear, vocab_size: int, peers: ProcessGroups) -> None:
        super().__init__()
        self.shard = shard
        self.out_features = vocab_size
        self._peers = peers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., V]."""
        return self._peers.concatenate(self.shard(x))[..., : self.out_features]


def bare_share(module: Any) -> Any:
    """Returns the share in a module that only sums or gathers; another module itself."""
    biased = isinstance(module, RowParallel) and module.bias is not None
    if biased or not isinstance(module, Summed | RowParallel | GatheredHead):
        return module
    return module.shard


class NoEmbedding(nn.Module):
    """Replaces the embedding on later stages, where only the shape of its output is used."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self._dtype = dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[..., T] -> [..., T, hidden] of zeros."""
        shape = (*input_ids.shape, self._hidden_size)
        return torch.zeros(shape, dtype=self._dtype, device=input_ids.device)


class ElsewhereLayer(nn.Module):
    """Replaces a layer of another stage; those next to this stage's layers receive or send."""

    def __init__(
        self, layer: nn.Module, peers: ProcessGroups, *, receives: bool = False, sends: bool = False
    ) -> None:
        super().__init__()
        self.attention_type: Any = getattr(layer, "attention_type", None)  # some models ask for it
        self._peers = peers
        self._receives = receives
        self._sends = sends

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[1, T, hidden] -> the same shape."""
        if self._receives:
            return self._peers.receive_hidden(hidden_states)
        if self._sends:
            self._peers.send_hidden(hidden_states)
        return hidden_states


class LayerSharder:
    """Replaces modules by their shares; ``cuts`` has the slices of a checkpoint's tensors.

    Child modules have to be replaced before their parents.
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
        """This rank's share of the module, or None if the style does not fit the module.

        Raises:
            InvalidConfig: A size is not divisible by the number of ranks.
        """
        if isinstance(style, Merged):
            widths = [int(getattr(self._config, field)) for field in style.fields]
            return self._columns(module, name, widths)
        way = self._ways.get(style)
        return None if way is None else way(module, name)

    def divide(self, module: Any, fields: Sequence[str]) -> None:
        """Divides attributes that are sizes; a shared configuration is copied first."""
        for path in fields:
            owner, _, field = path.rpartition(".")
            if owner:
                setattr(module, owner, copy.copy(getattr(module, owner)))
            counting = getattr(module, owner) if owner else module
            share = self._even(getattr(counting, field), 0, field)
            setattr(counting, field, share.stop - share.start)

    def slice(self, module: nn.Module, leaf: str, name: str, dim: int | str) -> None:
        """Shards a parameter in a dimension, or zeros it on all ranks but the first (``ONCE``)."""
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
        """A share of each projection that is merged into this layer."""
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
        """Experts with a router, and without shared experts."""
        mixture = self._model.get_submodule(name.rpartition(".")[0])
        if {child for child, _ in mixture.named_children()} != {"gate", "experts"}:
            return None
        shard = self._unsummed_experts(experts, name)
        return None if shard is None else Summed(shard, self._peers)

    def _unsummed_experts(self, experts: Any, name: str) -> nn.Module | None:
        if not is_experts(experts):
            return None
        count, hidden, width = experts.down_proj.shape
        part = self._even(width, 2, name)
        cut = ExpertsSlice(part.start, part.stop, width)
        self.cuts[f"{name}.{GATE_UP}"] = self.cuts[f"{name}.{DOWN}"] = cut
        share, dtype = part.stop - part.start, experts.down_proj.dtype
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
        part = self.cuts[f"{name}.weight"] = self._even(whole, 0, name)
        weight = torch.empty(part.stop - part.start, device="meta", dtype=dtype)
        return SharedNorm(nn.Parameter(weight), eps, whole, self._peers)

    def _summed(self, module: nn.Module, _: str) -> nn.Module:
        return Summed(module, self._peers)

    def _weight_part(
        self, linear: nn.Module, dim: int, whole: int, name: str, widths: Sequence[int] = (1,)
    ) -> WeightSlice | MergedSlice | TransposedSlice:
        """The slice of a weight [outputs, inputs]; a ``Conv1D`` has [inputs, outputs]."""
        if isinstance(linear, Conv1D):
            return TransposedSlice(self._part(1 - dim, whole, name, widths))
        return self._part(dim, whole, name, widths)

    def _part(
        self, dim: int, whole: int, name: str, widths: Sequence[int] = (1,)
    ) -> WeightSlice | MergedSlice:
        parts, first = list[WeightSlice](), 0
        for width in widths:
            size = whole // sum(widths) * width
            part = self._even(size, dim, name)
            parts.append(WeightSlice(dim, first + part.start, first + part.stop, whole))
            first += size
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
    """Inputs and outputs of a linear layer, or None for another module."""
    if type(linear) is nn.Linear:
        return linear.in_features, linear.out_features
    if type(linear) is Conv1D:
        return linear.nx, linear.nf
    return None


def _linear(like: Any, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias, device="meta", dtype=like.weight.dtype)


def check_sizes(config: PretrainedConfig, place: ParallelRank) -> None:
    """Checks that the sizes are divisible.

    Raises:
        InvalidConfig: The heads, key-value heads or the MLP's width are not a multiple of the
            tensor size, or there are fewer layers than stages.
    """
    text, size = config.get_text_config(decoder=True), place.tensor_size
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(text, field, None)
        if isinstance(value, int) and value % size:
            raise InvalidConfig(
                f"tensor_parallel_size ({size}) does not divide the model's {field} ({value})",
                "tensor_parallel_size",
            )
    if text.num_hidden_layers < place.stages:
        raise InvalidConfig(
            f"pipeline_parallel_size ({place.stages}) is over the model's "
            f"{text.num_hidden_layers} layers",
            "pipeline_parallel_size",
        )


def shard_model(model: PreTrainedModel, peers: ProcessGroups) -> Cuts:
    """Shards a model without weights in place and returns the slices of checkpoint tensors.

    Raises:
        InvalidConfig: A size is not divisible.
        UnsupportedModel: There is no plan for the model, or the plan does not fit.
    """
    plan = plan_of(model)
    if peers.place.stages > 1:
        _keep_stage(model, plan, peers)
    return _cut_layers(model, plan, peers) if peers.place.tensor_size > 1 else _whole_experts(model)


def checkpoint_name(parameter: str) -> str:
    """The checkpoint's name of a parameter of a sharded model."""
    return parameter.replace(f".{SHARD}.", ".")


def _whole_experts(model: PreTrainedModel) -> Cuts:
    """Slices of whole experts, which some checkpoints store one by one."""
    cuts: Cuts = {}
    for name, module in model.named_modules():
        if is_experts(module):
            width = module.get_parameter(DOWN).shape[2]
            cut = ExpertsSlice(0, width, width)
            cuts[f"{name}.{GATE_UP}"] = cuts[f"{name}.{DOWN}"] = cut
    return cuts


def _cut_layers(model: PreTrainedModel, plan: ShardPlan, peers: ProcessGroups) -> Cuts:
    if not plan.styles:
        raise _refused(model, peers, "tensor", "there is no plan to share its layers")
    cutter, used = LayerSharder(model, peers), set[str]()
    for name, module in reversed(list(model.named_modules())):  # children before their parents
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        cutter.divide(module, plan.counts.get(pattern, ()))
        for leaf in list(module._parameters):
            if (dim := plan.parameters.get(f"{pattern}.{leaf}")) is not None:
                cutter.slice(module, leaf, f"{name}.{leaf}", dim)
        style = plan.styles.get(pattern)
        if style is None or style in WHOLE or isinstance(module, nn.Identity):
            continue
        share = cutter.cut(module, name, style)
        if share is None:
            raise _refused(model, peers, "tensor", f"{pattern} is shared as {style!r}")
        model.set_submodule(name, share)
        used.add(COLUMNS if isinstance(style, Merged) else style)
    if not {COLUMNS, ROWS} <= used:
        raise _refused(model, peers, "tensor", "its layers are not those of its plan")
    return cutter.cuts


def _keep_stage(model: PreTrainedModel, plan: ShardPlan, peers: ProcessGroups) -> None:
    base: Any = model.base_model
    place, parts = peers.place, plan.stages
    layers = getattr(base, parts.layers, None) if parts else None
    if parts is None or not isinstance(layers, nn.ModuleList):
        raise _refused(model, peers, "pipeline", "there is no plan to cut it into stages")
    kept = place.layers(len(layers))
    for index, layer in enumerate(layers):
        if index not in kept:
            layers[index] = ElsewhereLayer(
                layer, peers, receives=index == kept.start - 1, sends=index == kept.stop
            )
    if not place.is_first:
        hidden_size = model.config.get_text_config(decoder=True).hidden_size
        for embedding in parts.embeddings:
            setattr(base, embedding, NoEmbedding(hidden_size, model.dtype))
    if not place.is_last:
        setattr(base, parts.norm, nn.Identity())
        model.set_submodule("lm_head", nn.Identity())


def _refused(model: PreTrainedModel, peers: ProcessGroups, kind: str, why: str) -> UnsupportedModel:
    config = model.config.get_text_config(decoder=True)
    place, field = peers.place, f"{kind}_parallel_size"
    size = place.tensor_size if kind == "tensor" else place.stages
    return UnsupportedModel(
        f"{field} ({size}): a model of type {config.model_type} ({type(model).__name__}) cannot "
        f"run on several devices so: {why}",
        field,
    )
