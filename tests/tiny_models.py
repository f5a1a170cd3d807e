"""Tiny random models of many architectures, made on the spot: no hub, only temporary files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

VOCAB = 128
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
}
# Of few heads some scores are all zero, as are those of padding; of equal ones torch chooses any.
_INDEX: dict[str, Any] = {
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "pad_token_id": None,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 12},
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
    "gemma2": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "phi3": {},
    "gpt2": {"n_positions": 256, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "deepseek_v3": _MLA,
    "deepseek_v32": {**_MLA, **_INDEX},
    "hy_v4": {**_MLA, **_INDEX},
    "glm_moe_dsa": {**_MLA, **_INDEX, "indexer_types": ["full", "shared", "full"]},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "cohere": {"use_qk_norm": True},
    "glm4": {},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "opt": {},
    "olmo3": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.5},
    "deepseek_v2": {**_MLA, "q_lora_rank": None, "topk_method": "greedy"},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "llama4_text": {
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "expand": 2,
    },
    "zamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 64,
        "num_key_value_heads": 4,
        "attention_head_dim": 16,
    },
    "bloom": {"n_head": 4, "n_layer": 3},
    "codegen": {"n_positions": 256, "n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 8},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "bias": False},
    "gpt_neo": {
        "num_layers": 3,
        "num_heads": 4,
        "attention_types": [[["local"], 3]],
        "window_size": 8,
    },
}
"""Those that only single tests want."""

_WIDE_NORMS = {"cohere", "olmo2", "olmo3", "olmoe"}  # other weights for each head
_SHARED_FIELDS = {"vocab_size", "bos_token_id", "eos_token_id", "initializer_range"}
_MAMBA_FIELDS = _SHARED_FIELDS | {"hidden_size", "num_hidden_layers", "pad_token_id"}
_OWN_FIELDS_ONLY = {
    "bloom": _SHARED_FIELDS | {"hidden_size"},
    "codegen": _SHARED_FIELDS,
    "falcon": _SHARED_FIELDS | {"hidden_size", "num_hidden_layers", "num_attention_heads"},
    "gpt_neo": _SHARED_FIELDS | {"hidden_size", "intermediate_size", "max_position_embeddings"},
    "gpt2": _SHARED_FIELDS,
    "mamba": _MAMBA_FIELDS,
    "mamba2": _MAMBA_FIELDS,
}


def tiny_config(architecture: str, **changes: Any) -> PretrainedConfig:
    base = _BASE
    if (kept := _OWN_FIELDS_ONLY.get(architecture)) is not None:
        base = {name: value for name, value in _BASE.items() if name in kept}
    return AutoConfig.for_model(
        architecture, **{**base, **{**ARCHITECTURES, **OTHERS}[architecture], **changes}
    )


def make_tiny_model(
    architecture: str, folder: Path, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A random fp32 model: saved to ``folder`` as safetensors, returned as transformers runs it."""
    torch.manual_seed(seed)
    config = tiny_config(architecture, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 and "norm" not in name:
                parameter.normal_(0.0, 0.2)  # biases and sinks: zeros would hide a missing one
            elif name.endswith(("q_norm.weight", "k_norm.weight")) and architecture in _WIDE_NORMS:
                parameter.uniform_(0.5, 1.5)  # ones would hide a wrong share
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return model.eval()


class TinyModel:
    """A tiny model as transformers runs it: what the paged runner must agree with."""

    def __init__(self, architecture: str, folder: Path, seed: int = 0, **changes: Any) -> None:
        self.folder = folder
        self.model = make_tiny_model(architecture, folder, seed, **changes)
        self._greedy: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """What transformers' own ``generate`` says, end of sequence included.

        It is asked once for each prompt and length: most tests ask about the same ones.
        """
        key = (tuple(map(int, prompt)), max_tokens)
        if key not in self._greedy:
            output = self.model.generate(
                torch.tensor([key[0]]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
            )
            self._greedy[key] = output[0, len(prompt) :].tolist()
        return list(self._greedy[key])

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """One forward over the whole context, no cache: [T, V]."""
        logits: torch.Tensor = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits
