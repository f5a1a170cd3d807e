"""Writes a model's folder as a GGUF file without a tokenizer (`pip install gguf safetensors`)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
Q4_0, Q8_0 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
Q4_K, Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
ENDS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _mostly_q4_0(name: str) -> Any:
    return Q8_0 if name in ("token_embd.weight", "output.weight") else Q4_0


def _q4_k_m(name: str) -> Any:
    """About as llama.cpp has it: the finer type in half of the layers."""
    if name in ("token_embd.weight", "output.weight"):
        return Q6_K
    fine = "attn_v" in name or "ffn_down" in name
    return Q6_K if fine and int(name.split(".")[1]) % 2 else Q4_K


PRECISIONS: dict[str, Callable[[str], Any]] = {
    "f32": lambda name: F32,
    "f16": lambda name: F16,
    "q8_0": lambda name: Q8_0,
    "q4_0": _mostly_q4_0,
    "q4_K_M": _q4_k_m,
}
"""The type of each matrix by its name in the file."""


def file_of(model: Path, precision: str) -> Path:
    """Where the file of a model's folder lies."""
    return model.with_name(f"{model.name}-{precision}.gguf")


def converted(model: Path, precision: str) -> Path:
    """Writes the file, unless it is there.

    K types have random codes: the package does not round to them.
    """
    path = file_of(model, precision)
    if not path.exists():
        config = json.loads((model / "config.json").read_text())
        writer = gguf.GGUFWriter(str(path), config["model_type"])
        describe(writer, config)
        for shard in sorted(model.glob("*.safetensors")):
            with safe_open(shard, "np") as tensors:
                for name in tensors.keys():
                    weights = tensors.get_tensor(name)
                    add_tensor(writer, config, name, weights, PRECISIONS[precision])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def add_tensor(
    writer: gguf.GGUFWriter,
    config: dict[str, Any],
    name: str,
    weights: Any,
    kind_of: Callable[[str], Any],
) -> None:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        target = f"blk.{number}.{NAMES[part]}.weight"
        if config["model_type"] == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            key_heads, heads = config["num_key_value_heads"], config["num_attention_heads"]
            weights = interleaved(weights, key_heads if part.endswith("k_proj") else heads)
    else:
        target = f"{ENDS[stem]}.weight"
    kind = kind_of(target) if weights.ndim > 1 else F32
    if kind in (Q4_K, Q6_K):
        writer.add_tensor(target, random_blocks(weights, kind), raw_dtype=kind)
    elif kind == F32:
        writer.add_tensor(target, weights.astype(np.float32))
    else:
        rounded = gguf.quants.quantize(weights.astype(np.float32), kind)
        writer.add_tensor(target, rounded, raw_dtype=kind)


def random_blocks(weights: Any, kind: Any) -> Any:
    """Random codes of numbers about as large as ``weights``."""
    outputs, inputs = weights.shape
    size, octets = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (outputs, inputs // size, octets), np.uint8)
    # The halves of a block are factors on its codes times their scales.
    typical = float(np.abs(weights[:64].astype(np.float32)).mean())
    places = (208,) if kind == Q6_K else (0, 2)
    for at in places:
        factor = np.float16(typical / (1000 if kind == Q6_K else 250))
        blocks[..., at : at + 2] = np.frombuffer(factor.tobytes(), np.uint8)
    return blocks.reshape(outputs, -1)


def interleaved(weights: Any, heads: int) -> Any:
    """Permutes weights: llama.cpp rotates neighbours of a Llama head, transformers its halves."""
    rows, inputs = weights.shape
    halves = weights.reshape(heads, 2, rows // heads // 2, inputs)
    return halves.swapaxes(1, 2).reshape(rows, inputs)
