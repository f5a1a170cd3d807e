"""Tiny models that pool, as folders: made on the spot, with a tokenizer over words."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

WORDS = "a the cat dog sat ran on under mat tree fish bird Sings query passage : yes no red".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[END]"]
VOCABULARY = {word: place for place, word in enumerate([*SPECIAL, *WORDS, "sings"])}
SIZE = 32
TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "bird Sings under the tree : the fish ran",
    "the red fish",
    "cat",
    "a cat and a dog ran under the red red tree on the mat with the fish and the bird",
]
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def save_tokenizer(folder: Path, *, encoder: bool, types: bool = False) -> None:
    """A word tokenizer: [CLS] text [SEP], with pairs, or a decoder's text [END]."""
    backend = Backend(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.normalizer = normalizers.NFC()
    if encoder:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    else:
        backend.post_processor = processors.TemplateProcessing(
            single="$A [END]", special_tokens=[("[END]", 4)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[END]",
        model_max_length=64,
        model_input_names=["input_ids", *(["token_type_ids"] if types else []), "attention_mask"],
    ).save_pretrained(folder)


def make_decoder(folder: Path, kind: str = "qwen3", head: str = "causal", **changes: Any) -> Path:
    """A decoder with the head "causal", "none" or "classes" (``num_labels``)."""
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    config = AutoConfig.for_model(kind, **(SIZES | sizes | {"eos_token_id": 4} | changes))
    torch.manual_seed(1)
    kinds: dict[str, Any] = {
        "causal": AutoModelForCausalLM,
        "none": AutoModel,
        "classes": AutoModelForSequenceClassification,
    }
    kinds[head].from_config(config).save_pretrained(folder)
    save_tokenizer(folder, encoder=False)
    return folder


def make_encoder(folder: Path, kind: str = "bert", head: str = "none", **changes: Any) -> Path:
    """An encoder with the head "none" or "classes" (``num_labels``)."""
    positions = 66 if kind in ("roberta", "xlm-roberta") else 64
    sizes: dict[str, Any] = {"max_position_embeddings": positions, "type_vocab_size": 2}
    if kind == "distilbert":
        sizes |= {"dim": SIZE, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    if kind == "modernbert":
        sizes |= {"local_attention": 6, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2}
        sizes |= {"eos_token_id": 3, "global_attn_every_n_layers": 2}
    config = AutoConfig.for_model(kind, **(SIZES | sizes | changes))
    torch.manual_seed(2)
    kinds: dict[str, Any] = {"none": AutoModel, "classes": AutoModelForSequenceClassification}
    model = kinds[head].from_config(config)
    for weight in model.parameters():  # norms and biases are ones and zeros at first
        if weight.dim() == 1:
            weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    save_tokenizer(folder, encoder=True, types=kind in ("bert", "nomic_bert", "electra"))
    return folder


def add_modules(
    folder: Path,
    pooling: dict[str, Any],
    *,
    dense: int | None = None,
    normalize: bool = True,
    settings: dict[str, Any] | None = None,
    sentence: dict[str, Any] | None = None,
) -> Path:
    """Writes sentence-transformers' files: the pooling, a dense layer to ``dense``, Normalize."""
    modules = ["Transformer", "Pooling"]
    write(folder / "1_Pooling/config.json", {"word_embedding_dimension": SIZE, **pooling})
    if dense is not None:
        modules.append("Dense")
        count = sum(value is True for name, value in pooling.items() if "mode" in name) or 1
        config = {"in_features": SIZE * count, "out_features": dense, "bias": True}
        config["activation_function"] = "torch.nn.modules.activation.Tanh"
        write(folder / "2_Dense/config.json", config)
        torch.manual_seed(3)
        weights = {"linear.weight": torch.randn(dense, SIZE * count) / 4}
        weights["linear.bias"] = torch.randn(dense)
        save_file(weights, folder / "2_Dense/model.safetensors")
    if normalize:
        modules.append("Normalize")
    names = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    listed = [
        {
            "idx": place,
            "name": str(place),
            "path": names.get(name, f"{place}_{name}"),
            "type": f"sentence_transformers.models.{name}",
        }
        for place, name in enumerate(modules)
    ]
    write(folder / "modules.json", listed)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 64} | (sentence or {}))
    write(folder / "config_sentence_transformers.json", settings or {})
    return folder


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
