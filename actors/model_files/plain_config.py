"""config.json as plain JSON: which models are known without transformers' classes.

A configuration class of transformers imports torch, and with it seconds of a start. The command,
an ingress and a batch worker ask only whether a model is a decoder of text.
"""

from typing import Any

from rayfin.actors.config import EngineArgs
from rayfin.actors.model_files.files import read_object

DECODERS = frozenset(
    (
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
        *("gemma", "gemma2", "gemma3_text", "phi", "phi3", "phimoe", "granite", "granitemoe"),
        *("olmo", "olmo2", "olmo3", "olmoe", "smollm3", "stablelm", "starcoder2", "falcon"),
        *("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_oss", "opt", "mpt", "bloom", "cohere"),
        *("cohere2", "deepseek_v2", "deepseek_v3", "glm", "glm4", "exaone4", "ernie4_5"),
        *("nemotron", "helium", "apertus", "arcee", "hunyuan_v1_dense", "seed_oss"),
    )
)
"""Model types that transformers has as causal language models, and as nothing else."""

SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "intermediate_size", "head_dim", "max_position_embeddings"),
)

NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    *("rope_theta", "partial_rotary_factor", "initializer_range", "attention_dropout"),
    *("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"),
    *("logit_scale", "logits_scaling", "attention_multiplier", "residual_multiplier"),
    *("embedding_multiplier", "sliding_window", "rope_local_base_freq"),
)


def is_known_decoder(args: EngineArgs) -> bool:
    """Whether the model is a decoder of text for certain.

    If not, transformers' configuration class has to say what it is, and what is wrong with it.
    """
    return known_config(args) is not None


def known_config(args: EngineArgs) -> dict[str, Any] | None:
    """The values in config.json of a model that is a decoder of text for certain, or None."""
    if args.hf_overrides or args.trust_remote_code:
        return None
    config = read_object(args.model, "config.json", **args.hub)
    kind = config.get("model_type")
    known = (
        isinstance(kind, str)
        and kind in DECODERS
        and _architecture(config).endswith(("ForCausalLM", "LMHeadModel"))
        and "auto_map" not in config
        and not config.get("is_encoder_decoder")
        and all(_is_size(config[name]) for name in SIZES if config.get(name) is not None)
        and all(_is_number(config[name]) for name in NUMBERS if config.get(name) is not None)
        and _fits(config)
    )
    return config if known else None


def _architecture(config: dict[str, Any]) -> str:
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and len(listed) == 1 else ""


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(config: dict[str, Any]) -> bool:
    """Whether rotary settings are numbers, lists have an entry for each layer, and heads share the
    hidden size evenly.
    """
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or not _is_number(rope.get("rope_theta", 1.0)):
        return False
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    for name in ("layer_types", "mlp_layer_types"):
        kinds = config.get(name)
        if kinds is not None and not (isinstance(kinds, list) and len(kinds) == layers):
            return False
    size = config.get("hidden_size")
    if size is None or heads is None or config.get("head_dim") is not None:
        return True
    return bool(size % heads == 0)
