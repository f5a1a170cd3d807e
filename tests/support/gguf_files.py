"""Tiny models in GGUF files, as llama.cpp's converter names, permutes and stores their tensors."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rayfin.actors.model_files import gguf_folder as folders
from rayfin.actors.runner.quantized.gguf_file import convert

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS, EXPERTS = 256, 512, 4, 2, 64, 2, 4
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HALVES = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "q4_k": (0, 2), "q5_k": (0, 2)}
SCALE = {"q2_k": 3e-3, "q3_k": 6e-4, "q4_k": 2e-4, "q5_k": 1e-4, "q6_k": 1e-4, "iq4_xs": 4e-5}


def byte_tokens() -> list[str]:
    """The letters that stand for bytes in GPT-2's tokenizer."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [*map(chr, plain), *(chr(256 + place) for place in range(len(others)))]


TOKENS = [*byte_tokens(), "ab", "<s>", "</s>", *(f"<{number}>" for number in range(5))]


def type_of(kind: str) -> Any:
    """gguf's type of this name."""
    return gguf.GGMLQuantizationType[kind.upper()]


def blocks(kind: str, outputs: int, inputs: int, random: Any, scale: float | None = None) -> Any:
    """Random bytes [outputs, bytes] of a type, whose halves are small numbers."""
    size, octets = gguf.GGML_QUANT_SIZES[type_of(kind)]
    made = random.integers(0, 256, (outputs, inputs // size, octets), np.uint8)
    for at in HALVES.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        numbers = random.normal(0, scale or SCALE.get(kind, 1e-3), made.shape[:2])
        made[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return made.reshape(outputs, -1)


def weight(kind: str, shape: tuple[int, ...], random: Any) -> Any:
    """Random weights as they lie in a file."""
    if kind in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"):
        flat = blocks(kind, int(np.prod(shape[:-1])), shape[-1], random)
        return flat.reshape(*shape[:-1], -1)
    numbers = random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
    return gguf.quants.quantize(numbers, type_of(kind))


def shapes(family: str, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of a family's file."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN)}
    if not tied:
        found["output.weight"] = (len(TOKENS), HIDDEN)
    found["output_norm.weight"] = (HIDDEN,)
    queries, keys = HEADS * HEAD, KV_HEADS * HEAD
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (queries, HIDDEN),
        "attn_k.weight": (keys, HIDDEN),
        "attn_v.weight": (keys, HIDDEN),
        "attn_output.weight": (HIDDEN, queries),
        "ffn_norm.weight": (HIDDEN,),
    }
    if family == "qwen2":
        sizes = {"q": queries, "k": keys, "v": keys}
        layer |= {f"attn_{part}.bias": (size,) for part, size in sizes.items()}
    if family in ("qwen3", "qwen3moe", "gemma3"):
        layer |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
    if family == "gemma3":
        layer |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    if family == "phi3":
        del layer["attn_q.weight"], layer["attn_k.weight"], layer["attn_v.weight"]
        layer["attn_qkv.weight"] = (queries + 2 * keys, HIDDEN)
        layer |= {"ffn_up.weight": (2 * INNER, HIDDEN), "ffn_down.weight": (HIDDEN, INNER)}
    elif family == "qwen3moe":
        layer["ffn_gate_inp.weight"] = (EXPERTS, HIDDEN)
        layer |= {f"ffn_{part}_exps.weight": (EXPERTS, INNER, HIDDEN) for part in ("gate", "up")}
        layer["ffn_down_exps.weight"] = (EXPERTS, HIDDEN, INNER)
    else:
        layer |= {f"ffn_{part}.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        layer["ffn_down.weight"] = (HIDDEN, INNER)
    for number in range(LAYERS):
        found |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    return found


def write_gguf(
    path: Path,
    kind: str | Callable[[str], str],  # of a matrix, or of the matrix of a name
    family: str = "llama",
    *,
    tied: bool = False,
    extra: Mapping[str, Any] | None = None,  # plain tensors, behind the others
    fields: Mapping[str, Any] | None = None,  # of the family, which it is written without
    without: str = "",  # the name of a tensor
    parts: int = 1,
) -> Path:
    """Writes a tiny model; in several ``parts`` the first one's path is returned."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(len(TOKENS))
    if family == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(INNER)
    _add_tokenizer(writer)
    if family == "phi3":
        writer.add_pad_token_id(258)  # else one of a larger table
    for name, value in (fields or {}).items():
        add: Any = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{family}.{name}", value)
    tensors = shapes(family, tied=tied)
    tensors.pop(without, None)
    for name, shape in tensors.items():
        if len(shape) == 1 or name.endswith("gate_inp.weight"):
            numbers = random.normal(1 if "norm" in name else 0, 0.1, shape)
            writer.add_tensor(name, numbers.astype(np.float32))
            continue
        own = kind if isinstance(kind, str) else kind(name)
        writer.add_tensor(name, weight(own, shape, random), raw_dtype=type_of(own))
    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, np.asarray(numbers, np.float32))
    if parts > 1:
        _split(writer, parts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if parts == 1:
        return path
    return path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def _add_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 257 + [3] * (len(TOKENS) - 257))
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _split(writer: Any, parts: int) -> None:
    """Spreads the tensors over files as gguf-split does."""
    whole = writer.tensors[0]
    each = -(-len(whole) // parts)
    names = list(whole)
    writer.tensors = [
        {name: whole[name] for name in names[first : first + each]}
        for first in range(0, len(names), each)
    ]
    writer.split_max_tensors = each


def mixed(name: str) -> str:
    """As Q4_K_M has them."""
    if name == "output.weight":
        return "q8_0"
    large = ("token_embd", "attn_v", "ffn_down")
    return "q6_k" if any(part in name for part in large) else "q4_k"


def plain(path: Path) -> Any:
    """transformers' model of the file's numbers in float32, with sizes that it does not read."""
    where: Any = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**where)
    for name, size in (("head_dim", HEAD), ("moe_intermediate_size", INNER)):
        if hasattr(config, name):
            setattr(config, name, size)
    model: Any = AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=torch.float32)
    model.is_quantized, model.generation_config.eos_token_id = False, None
    return model.eval()


def converted(path: Path) -> str:
    """Converts a file once and returns its folder."""
    folder = path.with_name(f"{path.stem}-folder")
    if not folder.is_dir():
        make_folder(folders._find(str(path), None, None), folder)
    return str(folder)


def make_folder(files: Sequence[Path], folder: Path) -> None:
    """Makes a folder of files in this process; `gguf_folder` starts one that imports torch."""
    folder.mkdir()
    convert([str(file) for file in files], str(folder))
