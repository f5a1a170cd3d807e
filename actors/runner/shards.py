"""A model cut for one rank of a group, before it has weights.

Tensor parallel (Megatron-LM): the layers of attention and MLP that transformers' own plan of the
model names "colwise" keep a share of their outputs, the "rowwise" ones that follow a share of their
inputs, and their results are summed over the ranks: twice a layer. The head has a share of the
vocabulary; embedding and norms are whole on each rank.

Pipeline parallel (GPipe): a stage keeps consecutive layers. In the place of those before and after
stand modules that receive, pass on and send the hidden states, so that the model's own forward runs
on each stage as it is.
"""

import re
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.runner.cuts import Cut, Cuts, ExpertsCut
from rayfin.actors.runner.fuse_layers import is_experts
from rayfin.actors.runner.parallel import Peers
from rayfin.actors.runner.place import Place
from rayfin.actors.runner.shard_experts import DOWN, GATE_UP, SummedExperts

COLUMNS, ROWS, GATHERED = "colwise", "rowwise", "colwise_gather_output"
EXPERTS = "moe_tp_experts"
WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise"}
STAGE_PARTS = {"embed_tokens", "layers", "norm"}
SHARD = "shard"  # what a wrapped linear layer is called within its wrapper


class RowParallel(nn.Module):
    """y = sum over ranks of x_r W_r^T, + b."""

    def __init__(self, shard: nn.Linear, bias: nn.Parameter | None, peers: Peers) -> None:
        super().__init__()
        self.shard = shard
        self.bias = bias
        self._peers = peers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K / ranks] -> [..., N]."""
        y = self._peers.sum(self.shard(x))
        return y if self.bias is None else y + self.bias


class GatheredHead(nn.Module):
    """Each rank computes its share of the vocabulary; all get all logits."""

    def __init__(self, shard: nn.Linear, vocab_size: int, peers: Peers) -> None:
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
        self, layer: nn.Module, peers: Peers, *, receives: bool = False, sends: bool = False
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


def check_sizes(config: PretrainedConfig, place: Place) -> None:
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


def cut_model(model: PreTrainedModel, peers: Peers) -> Cuts:
    """Cuts a model without weights in place; which parameters are parts, by name.

    Raises:
        UnsupportedModel: transformers has no plan for it, or one that is not this simple.
    """
    if peers.place.stages > 1:
        _keep_stage(model, peers)
    return _cut_layers(model, peers) if peers.place.tensor_size > 1 else _whole_experts(model)


def checkpoint_name(parameter: str) -> str:
    """The name under which a checkpoint has a parameter of a cut model."""
    return parameter.replace(f".{SHARD}.", ".")


def _whole_experts(model: PreTrainedModel) -> Cuts:
    """Experts are read one by one where a checkpoint has them so, also by a rank that has all."""
    cuts: Cuts = {}
    for name, module in model.named_modules():
        if is_experts(module):
            width = module.get_parameter(DOWN).shape[2]
            cut = ExpertsCut(0, width, width)
            cuts[f"{name}.{GATE_UP}"] = cuts[f"{name}.{DOWN}"] = cut
    return cuts


def _cut_layers(model: PreTrainedModel, peers: Peers) -> Cuts:
    plan = dict(model.tp_plan or {})
    if not {COLUMNS, ROWS} <= set(plan.values()):
        raise _no_plan(model, "transformers has no plan to share its layers", "tensor")
    cuts: Cuts = {}
    used: set[str] = set()
    for name, module in list(model.named_modules()):
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        style = plan.get(pattern)
        if style is None or isinstance(module, nn.Identity) or style in WHOLE:
            continue
        if style == EXPERTS and is_experts(module) and _stand_alone(model, name):
            model.set_submodule(name, _experts(module, name, peers, cuts))
            continue
        is_head = name == "lm_head"
        if type(module) is not nn.Linear or style != (GATHERED if is_head else style):
            raise _no_plan(model, f"{pattern} is shared as {style!r}", "tensor")
        if style == COLUMNS:
            cut = _columns(module, name, peers, cuts)
        elif style == ROWS:
            cut = _rows(module, name, peers, cuts)
        elif is_head:
            cut = _head(module, name, peers, cuts)
        else:
            raise _no_plan(model, f"{pattern} is shared as {style!r}", "tensor")
        model.set_submodule(name, cut)
        used.add(style)
    if not {COLUMNS, ROWS} <= used:
        raise _no_plan(model, "transformers' plan does not fit it", "tensor")
    return cuts


def _columns(linear: nn.Linear, name: str, peers: Peers, cuts: Cuts) -> nn.Module:
    cut = _even(linear.out_features, 0, name, peers)
    cuts[f"{name}.weight"] = cuts[f"{name}.bias"] = cut
    return _linear(linear, linear.in_features, cut.stop - cut.start, linear.bias is not None)


def _stand_alone(model: PreTrainedModel, name: str) -> bool:
    """Whether there are only a router and these experts: none that all rows share."""
    mixture = model.get_submodule(name.rpartition(".")[0])
    return {child for child, _ in mixture.named_children()} == {"gate", "experts"}


def _experts(experts: Any, name: str, peers: Peers, cuts: Cuts) -> nn.Module:
    count, hidden, width = experts.down_proj.shape
    own = _even(width, 2, name, peers)
    cut = ExpertsCut(own.start, own.stop, width)
    cuts[f"{name}.{SHARD}.{GATE_UP}"] = cuts[f"{name}.{SHARD}.{DOWN}"] = cut
    share, dtype = own.stop - own.start, experts.down_proj.dtype
    gate_up = torch.empty(count, 2 * share, hidden, device="meta", dtype=dtype)
    experts.gate_up_proj = nn.Parameter(gate_up)
    down = torch.empty(count, hidden, share, device="meta", dtype=dtype)
    experts.down_proj = nn.Parameter(down)
    return SummedExperts(experts, peers)


def _rows(linear: nn.Linear, name: str, peers: Peers, cuts: Cuts) -> nn.Module:
    cut = _even(linear.in_features, 1, name, peers)
    cuts[f"{name}.{SHARD}.weight"] = cut
    shard = _linear(linear, cut.stop - cut.start, linear.out_features, False)
    return RowParallel(shard, linear.bias, peers)


def _head(linear: nn.Linear, name: str, peers: Peers, cuts: Cuts) -> nn.Module:
    vocab_size, place = linear.out_features, peers.place
    share = -(-vocab_size // place.tensor_size)
    start = share * place.tensor_rank
    cut = Cut(0, start, start + share, vocab_size)
    cuts[f"{name}.{SHARD}.weight"] = cuts[f"{name}.{SHARD}.bias"] = cut
    shard = _linear(linear, linear.in_features, share, linear.bias is not None)
    return GatheredHead(shard, vocab_size, peers)


def _even(whole: int, dim: int, name: str, peers: Peers) -> Cut:
    size, rank = peers.place.tensor_size, peers.place.tensor_rank
    if whole % size:
        raise InvalidConfig(
            f"tensor_parallel_size ({size}) does not divide {name} ({whole})",
            "tensor_parallel_size",
        )
    share = whole // size
    return Cut(dim, share * rank, share * (rank + 1), whole)


def _linear(like: nn.Linear, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias, device="meta", dtype=like.weight.dtype)


def _keep_stage(model: PreTrainedModel, peers: Peers) -> None:
    base: Any = model.base_model
    place = peers.place
    plan = getattr(model.config.get_text_config(decoder=True), "base_model_pp_plan", None) or {}
    if set(plan) != STAGE_PARTS or not isinstance(getattr(base, "layers", None), nn.ModuleList):
        raise _no_plan(model, "transformers has no plan to cut it into stages", "pipeline")
    own = place.layers(len(base.layers))
    for index, layer in enumerate(base.layers):
        if index not in own:
            base.layers[index] = ElsewhereLayer(
                layer, peers, receives=index == own.start - 1, sends=index == own.stop
            )
    if not place.is_first:
        hidden_size = model.config.get_text_config(decoder=True).hidden_size
        base.embed_tokens = NoEmbedding(hidden_size, model.dtype)
    if not place.is_last:
        base.norm = nn.Identity()
        model.set_submodule("lm_head", nn.Identity())


def _no_plan(model: PreTrainedModel, why: str, kind: str) -> UnsupportedModel:
    name = type(model).__name__
    return UnsupportedModel(f"{name} cannot run on several devices: {why}", f"{kind}_parallel_size")
