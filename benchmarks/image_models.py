"""Models that read images, with random weights and all their files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

import rayfin.deployments.demo

PLACES = {
    "llava": ["<image>"],
    "qwen2_vl": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
}
"""What a prompt has for an image, by family."""
VIDEO = "<|video_pad|>"
POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model of 64 channels a head; a token of an image is of ``patch`` by ``patch`` pixels."""

    hidden: int
    inner: int
    layers: int
    tower_layers: int
    pixels: int  # of an image, in width and in height
    patch: int

    @property
    def heads(self) -> int:
        return self.hidden // 64

    @property
    def image_tokens(self) -> int:
        return (self.pixels // self.patch) ** 2


SIZES = {
    "100m": Sizes(hidden=512, inner=1536, layers=20, tower_layers=12, pixels=448, patch=28),
    "tiny": Sizes(hidden=128, inner=256, layers=2, tower_layers=2, pixels=112, patch=28),
}


def make_model(folder: Path, family: str, sizes: Sizes) -> list[int]:
    """Saves a model; returns the ids that a prompt has for an image."""
    tokenizer = _tokenizer(family)
    ids = tokenizer.convert_tokens_to_ids
    places: list[int] = [ids(token) for token in PLACES[family]]
    text = _text(len(tokenizer), sizes)
    if family == "llava":
        config = _llava(text, sizes, places[0])
        images = _clip_images(sizes)
    else:
        config = _qwen(text, sizes, places, ids(VIDEO))
        images = _qwen_images(sizes)
    torch.manual_seed(0)
    whole = AutoConfig.for_model(family, tie_word_embeddings=False, **config)
    AutoModelForImageTextToText.from_config(whole, dtype=torch.float32).save_pretrained(folder)
    if family == "llava":
        _rename_tower(folder / "model.safetensors")
    tokenizer.save_pretrained(folder)
    settings: dict[str, Any] = {"processor_class": "Qwen2VLProcessor"}
    if family == "llava":
        settings = {
            "processor_class": "LlavaProcessor",
            "patch_size": sizes.patch,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
            "image_token": PLACES[family][0],
        }
    (folder / "processor_config.json").write_text(json.dumps(settings))
    images |= {"processor_class": settings["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return places


def _rename_tower(path: Path) -> None:
    """Gives a tower's weights the names of published checkpoints, which all engines read."""
    new = "vision_tower.vision_model."
    weights = {
        name if name.startswith(new) else name.replace("vision_tower.", new): value
        for name, value in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})


def make_text_model(folder: Path, family: str, sizes: Sizes) -> None:
    """Saves a model of text alone with the sizes of a language model of ``make_model``."""
    tokenizer = _tokenizer(family)
    kind = "llama" if family == "llava" else "qwen2"
    config = AutoConfig.for_model(kind, **_text(len(tokenizer), sizes))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(family: str) -> Any:
    (demo,) = rayfin.deployments.demo.__path__
    tokenizer = AutoTokenizer.from_pretrained(Path(demo) / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": [*PLACES[family], VIDEO]})
    return tokenizer


def _text(vocab_size: int, sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads // 2,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
    }


def _llava(text: dict[str, Any], sizes: Sizes, place: int) -> dict[str, Any]:
    tower = {
        "model_type": "clip_vision_model",
        "hidden_size": sizes.hidden,
        "intermediate_size": 4 * sizes.hidden,
        "projection_dim": sizes.hidden,
        "num_hidden_layers": sizes.tower_layers,
        "num_attention_heads": sizes.heads,
        "image_size": sizes.pixels,
        "patch_size": sizes.patch,
    }
    return {
        "vision_config": tower,
        "text_config": {"model_type": "llama", **text},
        "image_token_index": place,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


def _clip_images(sizes: Sizes) -> dict[str, Any]:
    crop = {"height": sizes.pixels, "width": sizes.pixels}
    size = {"shortest_edge": sizes.pixels}
    return {"image_processor_type": "CLIPImageProcessor", "size": size, "crop_size": crop}


def _qwen(text: dict[str, Any], sizes: Sizes, places: list[int], video: int) -> dict[str, Any]:
    tower = {
        "depth": sizes.tower_layers,
        "embed_dim": sizes.hidden,
        "hidden_size": sizes.hidden,
        "num_heads": sizes.heads,
        "mlp_ratio": 4,
        "patch_size": sizes.patch // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    start, image, end = places
    return {
        "vision_config": tower,
        "text_config": {"model_type": "qwen2_vl_text", **text, "rope_parameters": rope},
        "vision_start_token_id": start,
        "image_token_id": image,
        "vision_end_token_id": end,
        "video_token_id": video,
    }


def _qwen_images(sizes: Sizes) -> dict[str, Any]:
    side = sizes.patch // 2
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": side,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (4 * side) ** 2, "longest_edge": sizes.pixels**2},
    }
