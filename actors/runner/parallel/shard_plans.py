"""Which share of each module a rank keeps: transformers' own plan of a model, or one from here.

A plan is data. Ours are for families of which transformers has none, or one that leaves work whole
on each rank: merged projections, norms over all heads, experts that all tokens share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedModel

COLUMNS, ROWS = "colwise", "rowwise"
GATHERED = "colwise_gather_output"  # of the head only: a share of the vocabulary
EXPERTS = "moe_tp_experts"
WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise"}

SUMMED = "summed"  # what the module gives is summed, so that what is in it need not be:
UNSUMMED_ROWS, UNSUMMED_EXPERTS = "rowwise, unsummed", "experts, unsummed"
NORM = "norm"  # root mean square over the columns of all ranks

ONCE = "once"  # what is added to a sum over ranks: zeros on all but the first


@dataclass(frozen=True, slots=True)
class Merged:
    """Columns of several projections side by side: a share of each.

    Their widths are to each other as these fields of the model's configuration.
    """

    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageParts:
    """What the decoder calls the parts that stages have some of."""

    embeddings: tuple[str, ...]  # of the first stage
    layers: str
    norm: str  # of the last stage


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How a family is cut. Names are below the decoder, with * for a layer's number."""

    styles: Mapping[str, str | Merged]
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes of modules that say how much of something there is: a rank has its share."""
    parameters: Mapping[str, int | str] = field(default_factory=dict)
    """Of modules that stay: the dimension that a rank has a share of, or ``ONCE``."""
    stages: StageParts | None = None  # None: it cannot be cut into stages


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
    "layers.*.mlp": SUMMED,  # a mixture, or a plain MLP in the place of one
    "layers.*.mlp.gate_proj": COLUMNS,
    "layers.*.mlp.up_proj": COLUMNS,
    "layers.*.mlp.down_proj": UNSUMMED_ROWS,
    "layers.*.mlp.experts": UNSUMMED_EXPERTS,
    "layers.*.mlp.shared_experts.gate_proj": COLUMNS,
    "layers.*.mlp.shared_experts.up_proj": COLUMNS,
    "layers.*.mlp.shared_experts.down_proj": UNSUMMED_ROWS,
}

_COHERE = ShardPlan(  # Command R+ has norms with weights of their own for each head
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

_DEEPSEEK = (
    ShardPlan(  # what heads have in common, before the second product of each pair, is whole
        {
            "layers.*.self_attn.q_proj": COLUMNS,
            "layers.*.self_attn.q_b_proj": COLUMNS,
            "layers.*.self_attn.kv_b_proj": COLUMNS,
            "layers.*.self_attn.o_proj": ROWS,
            **_MIXTURE,
        },
        stages=_USUAL,
    )
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
        "layers.*.attention.query_key_value": COLUMNS,  # by heads, each of the three
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
        "layers.*.mlp.experts.gate_up_proj": 2,  # [E, H, 2 F]: gate and up take turns
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
    """The plan of a model, by the whole names of its modules; without styles if nobody has one."""
    config = model.config.get_text_config(decoder=True)
    if own := PLANS.get(config.model_type):
        base = model.base_model_prefix
        return ShardPlan(
            {f"{base}.{name}": style for name, style in own.styles.items()} | {"lm_head": GATHERED},
            {f"{base}.{name}": fields for name, fields in own.counts.items()},
            {f"{base}.{name}": dim for name, dim in own.parameters.items()},
            own.stages,
        )
    styles = dict(model.tp_plan or {})
    if not {COLUMNS, ROWS} <= set(styles.values()):  # a plan for the head only, or for training
        styles = {}
    stages = set(getattr(config, "base_model_pp_plan", None) or {})
    is_usual = stages == {*_USUAL.embeddings, _USUAL.layers, _USUAL.norm}
    return ShardPlan(styles, stages=_USUAL if is_usual else None)
