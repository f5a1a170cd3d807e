"""Which share of a model each rank keeps: a plan for each family, and slices of checkpoint tensors.

A plan is data. transformers' own plan of a model is used where it has one; the plans here are for
families without one, or whose plan leaves work whole on each rank (merged projections, norms over
all heads, experts that all tokens share).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

COLUMNS, ROWS = "colwise", "rowwise"
GATHERED = "colwise_gather_output"  # the head, a share of the vocabulary
EXPERTS = "moe_tp_experts"
WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise"}

SUMMED = "summed"  # the module's output is summed, so its children need no sum:
UNSUMMED_ROWS, UNSUMMED_EXPERTS = "rowwise, unsummed", "experts, unsummed"
NORM = "norm"  # RMS norm over the columns of all ranks

ONCE = "once"  # added to a sum over ranks: zeros on all ranks but the first


@dataclass(frozen=True, slots=True)
class Merged:
    """Several projections merged into one; a rank keeps a share of each.

    Their widths are in proportion to these fields of the model's configuration.
    """

    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageParts:
    """The decoder's names of the parts that belong to some stages."""

    embeddings: tuple[str, ...]  # of the first stage
    layers: str
    norm: str  # of the last stage


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How a model family is sharded. Names are relative to the decoder; * is a layer's number."""

    styles: Mapping[str, str | Merged]
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes of modules that are sizes, which are divided."""
    parameters: Mapping[str, int | str] = field(default_factory=dict)
    """Parameters of modules that stay: the sharded dimension, or ``ONCE``."""
    stages: StageParts | None = None  # None if pipelines are not supported


_USUAL = StageParts(("embed_tokens",), "layers", "norm")
_ATTENTION: dict[str, str | Merged] = {
    "layers.*.self_attn.q_proj": COLUMNS,
    "layers.*.self_attn.k_proj": COLUMNS,
    "layers.*.self_attn.v_proj": COLUMNS,
    "layers.*.self_attn.o_proj": ROWS,
}

_MLP: dict[str, str | Merged] = {
    "layers.*.mlp.gate_proj": COLUMNS,
    "layers.*.mlp.up_proj": COLUMNS,
    "layers.*.mlp.down_proj": ROWS,
}
_MERGED_MLP: dict[str, str | Merged] = {
    "layers.*.mlp.gate_up_proj": Merged(("intermediate_size", "intermediate_size")),
    "layers.*.mlp.down_proj": ROWS,
}
_MIXTURE: dict[str, str | Merged] = {
    "layers.*.mlp": SUMMED,  # a mixture, or the plain MLP of a dense layer
    "layers.*.mlp.gate_proj": COLUMNS,
    "layers.*.mlp.up_proj": COLUMNS,
    "layers.*.mlp.down_proj": UNSUMMED_ROWS,
    "layers.*.mlp.experts": UNSUMMED_EXPERTS,
    "layers.*.mlp.shared_experts.gate_proj": COLUMNS,
    "layers.*.mlp.shared_experts.up_proj": COLUMNS,
    "layers.*.mlp.shared_experts.down_proj": UNSUMMED_ROWS,
}

_COHERE = ShardPlan(  # Command R+ has norm weights for each head
    {**_ATTENTION, **_MLP},
    parameters={"layers.*.self_attn.q_norm.weight": 0, "layers.*.self_attn.k_norm.weight": 0},
    stages=_USUAL,
)

_GLM4 = ShardPlan({**_ATTENTION, **_MERGED_MLP}, stages=_USUAL)
_GLM4_MOE = ShardPlan({**_ATTENTION, **_MIXTURE}, stages=_USUAL)

_PHI3 = ShardPlan(
    {
        "layers.*.self_attn.qkv_proj": Merged(
            ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")
        ),
        "layers.*.self_attn.o_proj": ROWS,
        **_MERGED_MLP,
    },
    counts={"layers.*.self_attn": ("num_key_value_heads", "config.num_attention_heads")},
    stages=_USUAL,
)

_QWEN2_MOE = ShardPlan(
    {
        **_ATTENTION,
        **_MIXTURE,
        "layers.*.mlp.shared_expert.gate_proj": COLUMNS,
        "layers.*.mlp.shared_expert.up_proj": COLUMNS,
        "layers.*.mlp.shared_expert.down_proj": UNSUMMED_ROWS,
    },
    stages=_USUAL,
)

_DEEPSEEK = ShardPlan(  # the latent projections, which all heads share, are whole
    {
        "layers.*.self_attn.q_proj": COLUMNS,
        "layers.*.self_attn.q_b_proj": COLUMNS,
        "layers.*.self_attn.kv_b_proj": COLUMNS,
        "layers.*.self_attn.o_proj": ROWS,
        **_MIXTURE,
    },
    stages=_USUAL,
)

_WHOLE_NORMS: dict[str, str | Merged] = {
    **_ATTENTION,
    "layers.*.self_attn.q_norm": NORM,
    "layers.*.self_attn.k_norm": NORM,
}

_OLMO2 = ShardPlan({**_WHOLE_NORMS, **_MLP}, stages=_USUAL)
_OLMOE = ShardPlan({**_WHOLE_NORMS, "layers.*.mlp.experts": EXPERTS}, stages=_USUAL)

_GPT2 = ShardPlan(
    {
        "h.*.attn.c_attn": Merged(("num_attention_heads",) * 3),
        "h.*.attn.c_proj": ROWS,
        "h.*.mlp.c_fc": COLUMNS,
        "h.*.mlp.c_proj": ROWS,
    },
    counts={"h.*.attn": ("num_heads", "split_size")},
    stages=StageParts(("wte", "wpe"), "h", "ln_f"),
)

_GPT_NEOX = ShardPlan(
    {
        "layers.*.attention.query_key_value": COLUMNS,  # ordered by heads, three parts each
        "layers.*.attention.dense": ROWS,
        "layers.*.mlp.dense_h_to_4h": COLUMNS,
        "layers.*.mlp.dense_4h_to_h": ROWS,
    },
    stages=StageParts(("embed_in",), "layers", "final_layer_norm"),
)

_GPT_OSS = ShardPlan(
    {**_ATTENTION, "layers.*.mlp.experts": SUMMED},
    parameters={
        "layers.*.self_attn.sinks": 0,
        "layers.*.mlp.experts.gate_up_proj": 2,  # [E, H, 2 F]: gate and up alternate
        "layers.*.mlp.experts.gate_up_proj_bias": 1,
        "layers.*.mlp.experts.down_proj": 1,  # [E, F, H]
        "layers.*.mlp.experts.down_proj_bias": ONCE,
    },
    stages=_USUAL,
)

PLANS: dict[str, ShardPlan] = {
    "cohere": _COHERE,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "glm4": _GLM4,
    "glm4_moe": _GLM4_MOE,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "gpt_oss": _GPT_OSS,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _OLMOE,
    "phi3": _PHI3,
    "qwen2_moe": _QWEN2_MOE,
}
"""By ``model_type``."""


def plan_of(model: PreTrainedModel) -> ShardPlan:
    """The plan of a model, with full module names. It has no styles if there is no plan."""
    config = model.config.get_text_config(decoder=True)
    if plan := PLANS.get(config.model_type):
        base = model.base_model_prefix
        return ShardPlan(
            {f"{base}.{name}": style for name, style in plan.styles.items()}
            | {"lm_head": GATHERED},
            {f"{base}.{name}": fields for name, fields in plan.counts.items()},
            {f"{base}.{name}": dim for name, dim in plan.parameters.items()},
            plan.stages,
        )
    styles = dict(model.tp_plan or {})
    if not {COLUMNS, ROWS} <= set(styles.values()):  # a plan for the head only, or for training
        styles = {}
    stages = set(getattr(config, "base_model_pp_plan", None) or {})
    is_usual = stages == {*_USUAL.embeddings, _USUAL.layers, _USUAL.norm}
    return ShardPlan(styles, stages=_USUAL if is_usual else None)


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A part of one tensor."""

    dim: int
    start: int
    stop: int  # may exceed ``whole``; the rest is zeros
    whole: int


@dataclass(frozen=True, slots=True)
class MergedSlice:
    """Several parts of one tensor, concatenated along the sliced dimension."""

    parts: tuple[WeightSlice, ...]


@dataclass(frozen=True, slots=True)
class TransposedSlice:
    """The parameter is the transpose of this part."""

    of: WeightSlice | MergedSlice


@dataclass(frozen=True, slots=True)
class ExpertsSlice:
    """A part of all experts' gate and up projections, or of all their down projections."""

    start: int
    stop: int
    whole: int  # the experts' inner width


AnyCut = WeightSlice | MergedSlice | TransposedSlice | ExpertsSlice
Cuts = dict[str, AnyCut]
"""By the name in a checkpoint. Tensors without an entry are whole."""


# A rank has a part of the inner width of each expert, and results are summed over ranks. The router
# is whole on each rank, so all ranks choose the same experts. A checkpoint stores the experts'
# weights in two tensors, or one by one under other names; both are read in slices.


Read = Callable[[str, torch.Size, WeightSlice | None], torch.Tensor]
"""Name, shape of the part, which part -> the part."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"

_FORMS = (  # names in a checkpoint: the MLP, and an expert's gate, up and down
    ("mlp", "gate_proj", "up_proj", "down_proj"),  # Qwen 2 and 3, OLMoE
    ("block_sparse_moe", "w1", "w3", "w2"),  # Mixtral
)


_OLD_NAMES = {
    ".mlp.": ".block_sparse_moe.",  # Mixtral's router
    "lm_head.": "embed_out.",  # GPT-NeoX
}


def stored_name(name: str, known: Callable[[str], bool]) -> str:
    """The checkpoint's name of a parameter, which transformers may have renamed."""
    others = (name.replace(new, old) for new, old in _OLD_NAMES.items())
    return name if known(name) else next(filter(known, others), name)


def read_experts(
    name: str, shape: torch.Size, cut: ExpertsSlice, known: Callable[[str], bool], read: Read
) -> torch.Tensor:
    """A rank's part [E, ...] of the experts' parameter ``name``.

    Raises:
        InvalidConfig: The checkpoint has it under no known name (raised by ``read``).
    """
    count, width = shape[0], cut.stop - cut.start
    is_down = name.endswith(DOWN)
    base = name.rpartition(".")[0]
    for mlp, gate, up, down in _FORMS:
        prefix = base.replace(".mlp.", f".{mlp}.")
        if not known(f"{prefix}.0.{down}.weight"):
            continue
        part = WeightSlice(1 if is_down else 0, cut.start, cut.stop, cut.whole)
        rows = [shape[1], width] if is_down else [width, shape[2]]
        kinds = (down,) if is_down else (gate, up)
        experts = [
            torch.cat(
                [read(f"{prefix}.{i}.{kind}.weight", torch.Size(rows), part) for kind in kinds]
            )
            for i in range(count)
        ]
        return torch.stack(experts)
    if is_down:
        return read(name, shape, WeightSlice(2, cut.start, cut.stop, cut.whole))
    half = torch.Size([count, width, shape[2]])
    whole = 2 * cut.whole
    parts = [
        read(name, half, WeightSlice(1, first + cut.start, first + cut.stop, whole))
        for first in (0, cut.whole)
    ]
    return torch.cat(parts, dim=1)
