"""A model cut for one rank of a group, before it has weights.

Tensor parallel (Megatron-LM): by the plan of the model's family (``plans.py``) some layers of
attention and MLP keep a share of their outputs, those that follow a share of their inputs, and what
these give is summed over the ranks: twice a layer. The head has a share of the vocabulary;
embedding and norms are whole on each rank.

Pipeline parallel (GPipe): a stage keeps consecutive layers. In the place of those before and after
stand modules that receive, pass on and send the hidden states, so that the model's own forward runs
on each stage as it is.
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

SHARD = "shard"  # what a wrapped module is called within its wrapper


class Summed(nn.Module):
    """The sum over ranks of what their shares give."""

    def __init__(self, shard: nn.Module, peers: ProcessGroups) -> None:
        super().__init__()
        self.shard = shard
        self._peers = peers

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """[..., N], as the shard has it."""
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
    """A root mean square norm over what all ranks have; each scales its share.

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
        own = x.float()
        squares = self._peers.sum(own.square().sum(-1, keepdim=True))
        scaled = own * torch.rsqrt(squares / self._whole + self._eps)
        return (self.weight * scaled).to(x.dtype)


class GatheredHead(nn.Module):
    """Each rank computes its share of the vocabulary; all get all logits."""

    def __init__(self, shard: nn.Linear, vocab_size: int, peers: ProcessGroups) -> None:
        super().__init__()
        self.shard = shard
        self._vocab_size = vocab_size
        self._peers = peers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., V]."""
        return self._peers.concatenate(self.shard(x))[..., : self._vocab_size]


class NoEmbedding(nn.Module):
    """On a stage after the first: what it gives is only looked at for its shape."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self._dtype = dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[..., T] -> [..., T, hidden] of zeros."""
        shape = (*input_ids.shape, self._hidden_size)
        return torch.zeros(shape, dtype=self._dtype, device=input_ids.device)


class ElsewhereLayer(nn.Module):
    """In the place of a layer of another stage; next to this stage's it receives, or sends."""

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


def check_sizes(config: PretrainedConfig, place: ParallelRank) -> None:
    """Refuses what does not divide.

    Raises:
        InvalidConfig: heads, key-value heads or the MLP's width are no multiple of the tensor size,
            or there are fewer layers than stages.
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
    """Cuts a model without weights in place; which tensors of a checkpoint it has parts of.

    Raises:
        InvalidConfig: something does not divide.
        UnsupportedModel: there is no plan for it, or it is not as its plan says.
    """
    plan = plan_of(model)
    if peers.place.stages > 1:
        _keep_stage(model, plan, peers)
    return _cut_layers(model, plan, peers) if peers.place.tensor_size > 1 else _whole_experts(model)


def checkpoint_name(parameter: str) -> str:
    """The name under which a checkpoint has a parameter of a cut model."""
    return parameter.replace(f".{SHARD}.", ".")


def _whole_experts(model: PreTrainedModel) -> Cuts:
    """Experts are read one by one where a checkpoint has them so, also by a rank that has all."""
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
    for name, module in reversed(list(model.named_modules())):  # what is in a module, then itself
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
    own = place.layers(len(layers))
    for index, layer in enumerate(layers):
        if index not in own:
            layers[index] = ElsewhereLayer(
                layer, peers, receives=index == own.start - 1, sends=index == own.stop
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
