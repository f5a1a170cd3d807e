"""A Whisper checkpoint of CTranslate2 as one of transformers, for tests and benchmarks.

    python tests/support/ctranslate2_whisper.py FOLDER INTO

Source of the file's form: CTranslate2's ``model_spec.py``, which writes it.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

TYPES: dict[int, Any] = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
ATTENTION = {  # names of its layers: those of transformers', which are one behind the other in it
    "self_attention": ("self_attn", (("q_proj", "k_proj", "v_proj"), ("out_proj",))),
    "attention": ("encoder_attn", (("q_proj",), ("k_proj", "v_proj"), ("out_proj",))),
}


def read_tensors(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """The named arrays of a ``model.bin``."""

    def number(form: str) -> int:
        (value,) = struct.unpack("<" + form, file.read(struct.calcsize(form)))
        return int(value)

    def text() -> str:
        return file.read(number("H"))[:-1].decode()

    number("I"), text(), number("I")
    for _ in range(number("I")):
        name, rank = text(), number("B")
        shape = [number("I") for _ in range(rank)]
        kind = TYPES[number("B")]
        yield name, np.frombuffer(file.read(number("I")), kind).reshape(shape)


def convert(source: Path, into: Path) -> None:
    """Writes the checkpoint in ``source`` as transformers reads it."""
    with (source / "model.bin").open("rb") as file:
        tensors = dict(read_tensors(file))
    asked = json.loads((source / "config.json").read_text())
    vocabulary, width = tensors["decoder/embeddings/weight"].shape
    multilingual = vocabulary >= 51865
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )
    known = tokenizer.get_vocab()
    times = [f"<|{at * 0.02:.2f}|>" for at in range(1501)]
    tokenizer.add_tokens([name for name in times if name not in known])
    known = tokenizer.get_vocab()
    assert known["<|30.00|>"] == vocabulary - 1
    end, start = known["<|endoftext|>"], known["<|startoftranscript|>"]
    layers = {
        side: 1
        + max(
            int(name.split("_")[1].split("/")[0])
            for name in tensors
            if side + "/layer_" in name and name.split("/")[1] != "layer_norm"
        )
        for side in ("encoder", "decoder")
    }
    heads = int(tensors["encoder/num_heads"])
    config = WhisperConfig(
        vocab_size=vocabulary,
        num_mel_bins=tensors["encoder/conv1/weight"].shape[1],
        d_model=width,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=start,
        architectures=["WhisperForConditionalGeneration"],
    )
    model = WhisperForConditionalGeneration(config)
    missing, unknown = model.load_state_dict(dict(_renamed(tensors)), strict=False)
    assert not unknown and set(missing) <= {"proj_out.weight"}, (missing, unknown)
    model.tie_weights()
    settings: dict[str, Any] = {
        "is_multilingual": multilingual,
        "alignment_heads": asked["alignment_heads"],
        "no_timestamps_token_id": known["<|notimestamps|>"],
        "max_initial_timestamp_index": 50,
        "suppress_tokens": asked["suppress_ids"],
        "begin_suppress_tokens": asked["suppress_ids_begin"],
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "bos_token_id": end,
        "pad_token_id": end,
        "max_length": 448,
        "return_timestamps": False,
    }
    if multilingual:
        codes = [
            name
            for name in known
            if name.startswith("<|") and name[2:-2].isalpha() and len(name) in (6, 7)
        ]
        settings["lang_to_id"] = {name: known[name] for name in codes}
        settings["task_to_id"] = {
            name: known[f"<|{name}|>"] for name in ("translate", "transcribe")
        }
    model.generation_config = GenerationConfig(**settings)
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(into)
    path = into / "preprocessor_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "processor_class": "WhisperProcessor"})
    )


def _renamed(tensors: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, array in tensors.items():
        if array.dtype.kind != "f" or array.ndim == 0:
            continue
        tensor = torch.from_numpy(array.astype(np.float32))
        side, *parts = name.split("/")
        leaf = {"gamma": "weight", "beta": "bias"}.get(parts[-1], parts[-1])
        if parts[0] == "embeddings":
            yield f"model.{side}.embed_tokens.weight", tensor
        elif parts[0] == "position_encodings":
            yield f"model.{side}.embed_positions.weight", tensor
        elif not parts[0].startswith("layer_") or parts[0] == "layer_norm":
            yield f"model.{side}.{parts[0]}.{leaf}", tensor
        else:
            layer = f"model.{side}.layers.{parts[0].removeprefix('layer_')}"
            yield from _of_layer(layer, parts[1:-1], leaf, tensor)


def _of_layer(
    layer: str, parts: list[str], leaf: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    kind, part = parts
    if kind == "ffn":
        own = {"linear_0": "fc1", "linear_1": "fc2", "layer_norm": "final_layer_norm"}[part]
        yield f"{layer}.{own}.{leaf}", tensor
        return
    name, linears = ATTENTION[kind]
    if part == "layer_norm":
        yield f"{layer}.{name}_layer_norm.{leaf}", tensor
        return
    own_names = linears[int(part.removeprefix("linear_"))]
    for own, piece in zip(own_names, tensor.chunk(len(own_names)), strict=True):
        if not (own == "k_proj" and leaf == "bias"):  # zeros, which transformers has not
            yield f"{layer}.{name}.{own}.{leaf}", piece.contiguous()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
