"""A model cut for one rank of a group, before it has weights.

Tensor parallel (Megatron-LM): by the plan of the model's family (``shard_plans.py``) some layers of
attention and MLP keep a share of their outputs, those that follow a share of their inputs, and what
these give is summed over the ranks: twice a layer. The head has a share of the vocabulary;
embedding and norms are whole on each rank.

Pipeline parallel (GPipe): a stage keeps consecutive layers. In the place of those before and after
stand modules that receive, pass on and send the hidden states, so that the model's own forward runs
on each stage as it is.
"""

import re
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.runner.models.inspect_layers import is_experts
from rayfin.actors.runner.parallel.process_groups import ProcessGroups
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.runner.parallel.shard_layers import LayerSharder
from rayfin.actors.runner.parallel.shard_modules import SHARD, ElsewhereLayer, NoEmbedding
from rayfin.actors.runner.parallel.shard_plans import (
    COLUMNS,
    ROWS,
    WHOLE,
    Merged,
    ShardPlan,
    plan_of,
)
from rayfin.actors.runner.parallel.weight_slices import DOWN, GATE_UP, Cuts, ExpertsSlice


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
