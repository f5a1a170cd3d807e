"""GGUF files of the plainest decoders become folders without torch, whose import takes longer.

All others are for transformers' reading (runner/quantized/gguf_file.py), with the same result.
"""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayfin.actors.model_files.gguf_header import GgufTensor, Header, read_header
from rayfin.actors.model_files.gguf_tokenizer import end_tokens, make_tokenizer
from rayfin.actors.timing import GGUF_PROGRESS_SECONDS

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
MATRICES = {
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj"},
    **{"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
}
NORMS = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
}
OUTER = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
KNOWN = re.compile(
    r"(general|tokenizer|quantize|split)\..*|\w+\.(vocab_size|rope\.dimension_count"
    r"|attention\.(key|value)_length)"
)
"""Fields that a decoder with only the sizes above may have."""

BLOCKS = {
    **{2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24)},
    **{8: ("q8_0", 32, 34), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144)},
    **{13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 20: ("iq4_nl", 32, 18)},
    **{23: ("iq4_xs", 256, 136)},
}
"""By ggml's type: its name, numbers of a block, and bytes of one."""
F32 = 0


def convert_plain(files: Sequence[str], folder: str) -> bool:
    """Writes the model in ``files``, the parts of one, to ``folder``, if it is a plain decoder.

    Returns:
        False: it is not, and nothing is written.

    Raises:
        ValueError: a file is broken.
    """
    header = read_header(files[0])
    if len(files) > 1 or not is_plain(header):
        return False
    try:
        tokenizer = make_tokenizer(header.fields)
    except Exception:  # of the package for tokenizers; the other reading says why, and goes on
        return False
    tokenizer.save_pretrained(folder)
    tied = all(one.name != "output.weight" for one in header.tensors)
    _write_weights(header, Path(files[0]), Path(folder, "model.safetensors"))
    _write_json(Path(folder, "config.json"), _config(header, tied))
    ends = {"_from_model_config": True, "eos_token_id": end_tokens(header.fields)}
    _write_json(Path(folder, "generation_config.json"), ends | _tokens(header, "bos", "pad"))
    return True


def is_plain(header: Header) -> bool:
    """Returns whether the model is its architecture alone, with all matrices in known blocks."""
    known = {f"{header.architecture}.{key}" for key in (*SIZES, "rope.freq_base")}
    fields_known = all(name in known or KNOWN.fullmatch(name) for name in header.fields)
    plain = header.architecture in ARCHITECTURES and known <= header.fields.keys() and fields_known
    if not plain or header.fields.get("tokenizer.ggml.model") != "gpt2":
        return False
    return all(_is_known(one, header.architecture) for one in header.tensors)


def _is_known(tensor: GgufTensor, architecture: str) -> bool:
    match = LAYER.fullmatch(tensor.name)
    name = match[2] if match else tensor.name.removesuffix(".weight")
    if "_norm" in name:
        known = name in NORMS if match else name in OUTER
        return known and tensor.kind == F32 and (architecture == "qwen3" or name[:6] != "attn_q")
    return name in (MATRICES if match else OUTER) and tensor.kind in BLOCKS


def _name(tensor: str) -> str:
    match = LAYER.fullmatch(tensor)
    if match is None:
        return OUTER[tensor.removesuffix(".weight")]
    return f"model.layers.{match[1]}.{(MATRICES | NORMS)[match[2]]}"


def _tokens(header: Header, *names: str) -> dict[str, Any]:
    keys = {name: f"tokenizer.ggml.{TOKENS[name]}_token_id" for name in names}
    return {
        f"{name}_token_id": header.fields[key] for name, key in keys.items() if key in header.fields
    }


def _config(header: Header, tied: bool) -> dict[str, Any]:
    sizes = {name: header.get(key) for key, name in SIZES.items()}
    head = header.get("attention.key_length") or header.get("rope.dimension_count")
    return {
        "architectures": [ARCHITECTURES[header.architecture]],
        "model_type": header.architecture,
        "dtype": "bfloat16",
        **sizes,
        "head_dim": head or sizes["hidden_size"] // sizes["num_attention_heads"],
        "rope_parameters": {"rope_theta": header.get("rope.freq_base"), "rope_type": "default"},
        "vocab_size": header.get("vocab_size") or len(header.fields["tokenizer.ggml.tokens"]),
        **_tokens(header, *TOKENS),
        "tie_word_embeddings": False,  # a tied table is the head's codes too
        "quantization_config": {"quant_method": "gguf", "tied": tied},
    }


def _write_weights(header: Header, source: Path, path: Path) -> None:
    """Writes a safetensors file of all tensors in their own types, those of floats first."""
    tensors = sorted(header.tensors, key=lambda one: one.kind != F32)
    places, end = dict[str, Any](), 0
    for one in tensors:
        name, dtype, shape = _name(one.name), "F32", list(one.shape)
        size = 4 * shape[0]
        if one.kind != F32:
            kind, numbers, octets = BLOCKS[one.kind]
            name, dtype, shape = f"{name}.{kind}", "U8", [shape[0], shape[1] // numbers * octets]
            size = shape[0] * shape[1]
        name += ".weight" if one.kind == F32 else ""
        places[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + size]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **places}).encode()
    text += b" " * (-len(text) % 64)
    data, shown = np.memmap(source, np.uint8, "r"), time.monotonic()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one, place in zip(tensors, places.values(), strict=True):
            begin, behind = place["data_offsets"]
            rows = data[one.offset : one.offset + behind - begin]
            if len(rows) < behind - begin:
                raise ValueError(f"it ends before its tensor {one.name} does")
            file.write(np.ascontiguousarray(_ordered(header, one, rows)).data)
            if time.monotonic() - shown > GGUF_PROGRESS_SECONDS:
                shown = time.monotonic()
                print(f"... {100 * behind // end} % of it", flush=True)


def _ordered(header: Header, tensor: GgufTensor, octets: Any) -> Any:
    """Undoes what llama.cpp's converter does to queries and keys of Llama's kind.

    It puts the rows of the two halves of each head between each other.
    """
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    key = heads.get(tensor.name.split(".")[-2])
    if header.architecture != "llama" or key is None:
        return octets
    count, rows = header.get(key), tensor.shape[0]
    return octets.reshape(count, rows // count // 2, 2, -1).swapaxes(1, 2)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
