"""Tiny random vision-language models with a processor, a tokenizer and a chat template each."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

from rayfin.actors.config import EngineArgs
from rayfin.actors.media.image_processor import ImageProcessor
from rayfin.actors.media.part import VIRTUAL_TOKENS
from rayfin.actors.media.processed import put_media
from rayfin.actors.media.virtual_ids import put_virtual_ids

SPECIAL = (
    *("<pad>", "<s>", "</s>", "<image>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *("<img>", "</img>", "[IMG_BREAK]", "[IMG_END]", "<start_of_image>", "<end_of_image>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    *("[INST]", "[/INST]", "[BEGIN_AUDIO]", "[TRANSCRIBE]", "<|audio_bos|>", "<|audio_eos|>"),
)
PAD, BOS, EOS, IMAGE, VISION_START, VISION_END, VIDEO = range(7)
VOCAB = 512
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
TOWER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 7,
    "image_size": 28,
    "initializer_range": 0.2,
    "initializer_factor": 4.0,
}
QWEN_TOWER: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 24,
    "hidden_size": 32,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}
QWEN_TEXT = TEXT | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}
QWEN3_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "initializer_range": 0.2,
}
QWEN3_TEXT = TEXT | {
    "num_hidden_layers": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
PIXTRAL_TOWER = {name: TOWER[name] for name in TOWER if name != "initializer_factor"} | {
    "model_type": "pixtral",
    "image_size": 56,
}
PIXTRAL_IMAGES = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 42},
    "patch_size": {"height": 7, "width": 7},
}
SMALL = {"height": 28, "width": 28}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "PLACE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

FAMILIES: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    # model type: config, class of the processor, its settings, those of its image processor
    "llava": (
        {
            "vision_config": {"model_type": "clip_vision_model", **TOWER, "projection_dim": 24},
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_index": IMAGE,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        "LlavaProcessor",
        {
            "patch_size": 7,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": SMALL,
        },
    ),
    "qwen2_vl": (
        {
            "vision_config": QWEN_TOWER,
            "text_config": {"model_type": "qwen2_vl_text", **QWEN_TEXT},
            **QWEN_IDS,
        },
        "Qwen2VLProcessor",
        {},
        QWEN_IMAGES,
    ),
    "qwen2_5_vl": (
        {
            "vision_config": {
                **QWEN_TOWER,
                "hidden_size": 24,
                "out_hidden_size": 32,
                "intermediate_size": 32,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            "text_config": {"model_type": "qwen2_5_vl_text", **QWEN_TEXT},
            **QWEN_IDS,
        },
        "Qwen2_5_VLProcessor",
        {},
        QWEN_IMAGES,
    ),
    "idefics3": (
        {
            "vision_config": {"model_type": "idefics3_vision", **TOWER},
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        "Idefics3Processor",
        {"image_seq_len": 4},
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
            "do_image_splitting": True,
        },
    ),
    "internvl": (
        {
            "vision_config": {
                **TOWER,
                "image_size": [28, 28],
                "patch_size": [7, 7],
                "norm_type": "layer_norm",
            },
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
            "image_seq_length": 4,
        },
        "InternVLProcessor",
        {"image_seq_length": 4},
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": SMALL,
            "crop_to_patches": True,
            "max_patches": 3,
        },
    ),
    "llava_next": (
        {
            "vision_config": {"model_type": "clip_vision_model", **TOWER, "projection_dim": 24},
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        "LlavaNextProcessor",
        {
            "patch_size": 7,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": SMALL,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
    ),
    "llava_onevision": (
        {
            "vision_config": {"model_type": "siglip_vision_model", **TOWER},
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        "LlavaOnevisionProcessor",
        {
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "image_token": "<image>",
            "video_token": "<|video_pad|>",
            "vision_aspect_ratio": "anyres_max_9",
        },
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": SMALL,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
    ),
    "qwen3_vl": (
        {
            "vision_config": QWEN3_TOWER,
            "text_config": {"model_type": "qwen3_vl_text", **QWEN3_TEXT},
            **QWEN_IDS,
        },
        "Qwen3VLProcessor",
        {},
        QWEN_IMAGES,
    ),
    "qwen3_vl_moe": (
        {
            "vision_config": QWEN3_TOWER,
            "text_config": {
                "model_type": "qwen3_vl_moe_text",
                **QWEN3_TEXT,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "decoder_sparse_step": 1,
            },
            **QWEN_IDS,
        },
        "Qwen3VLProcessor",
        {},
        QWEN_IMAGES,
    ),
    "smolvlm": (
        {
            "vision_config": {"model_type": "smolvlm_vision", **TOWER},
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        "SmolVLMProcessor",
        {"image_seq_len": 4},
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
            "do_image_splitting": True,
        },
    ),
    "mistral3": (
        {
            "vision_config": PIXTRAL_TOWER,
            "text_config": {"model_type": "mistral", **TEXT},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
        "PixtralProcessor",
        {"patch_size": 7, "spatial_merge_size": 2, "image_token": "[IMG]"},
        PIXTRAL_IMAGES,
    ),
    "pixtral": (
        {
            "model_type": "llava",
            "vision_config": PIXTRAL_TOWER,
            "text_config": {"model_type": "mistral", **TEXT},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        "PixtralProcessor",
        {"patch_size": 7, "image_token": "[IMG]"},
        PIXTRAL_IMAGES,
    ),
    "gemma3": (
        {
            "vision_config": {"model_type": "siglip_vision_model", **TOWER},
            "text_config": {
                "model_type": "gemma3_text",
                **TEXT,
                "query_pre_attn_scalar": 8,
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "image_token_index": IMAGE,
            "mm_tokens_per_image": 16,
            "tie_word_embeddings": False,
        },
        "Gemma3Processor",
        {"image_seq_length": 16},
        {"image_processor_type": "Gemma3ImageProcessor", "size": SMALL},
    ),
    "paligemma": (
        {
            "vision_config": {
                "model_type": "siglip_vision_model",
                **TOWER,
                "vision_use_head": False,
                "projection_dim": 32,
            },
            "text_config": {"model_type": "gemma", **TEXT},
            "image_token_index": IMAGE,
            "projection_dim": 32,
            "tie_word_embeddings": False,
        },
        "PaliGemmaProcessor",
        {},
        {"image_processor_type": "SiglipImageProcessor", "size": SMALL, "image_seq_length": 16},
    ),
}
NAMED: dict[str, dict[str, str]] = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<|video_pad|>",
    },
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
}
"""Tokens that a family's tokenizer has as attributes."""

PLACES = {
    "internvl": "<IMG_CONTEXT>",
    "gemma3": "<image_soft_token>",
    "mistral3": "[IMG]",
    "pixtral": "[IMG]",
} | dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "<|image_pad|>")
"""The token for an image, where it is not <image>."""


def make_tokenizer(
    image_token: str = "<image>", names_of: dict[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens of all families."""
    special = [image_token if token == "<image>" else token for token in SPECIAL]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE({name: at for at, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=names_of or {},
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[3:]})
    return tokenizer


def make_vision_model(family: str, folder: Path, seed: int = 0) -> Any:
    """Saves a random model of the family with all its files; returns it as transformers runs it."""
    config, processor, settings, images = FAMILIES[family]
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(**{"model_type": family, **config}), dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 and "norm" not in name:
                parameter.normal_(0.0, 0.2)
            elif parameter.dim() >= 2 and parameter.std() < 0.1:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    token = PLACES.get(family, "<image>")
    tokenizer = make_tokenizer(token, NAMED.get(family))
    tokenizer.chat_template = TEMPLATE.replace("PLACE", _place(family, token))
    tokenizer.save_pretrained(folder)
    written = {"processor_class": processor, **settings}
    (folder / "processor_config.json").write_text(json.dumps(written))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"processor_class": processor, **images})
    )
    return model.eval()


def _place(family: str, token: str) -> str:
    if family == "gemma3":
        return "<start_of_image>"
    return f"<|vision_start|>{token}<|vision_end|>" if family.startswith("qwen") else token


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """An RGB image of random blocks."""
    drawn = np.random.default_rng(seed).integers(0, 256, (height // 5, width // 5, 3), np.uint8)
    return Image.fromarray(drawn.repeat(5, 0).repeat(5, 1), "RGB")


class VisionModel:
    """A tiny model as transformers runs it: what the runner must agree with."""

    def __init__(self, family: str, folder: Path, seed: int = 0) -> None:
        self.family, self.folder = family, folder
        self.model = make_vision_model(family, folder, seed)
        self.processor = ImageProcessor.load(EngineArgs(model=str(folder)))
        self._said: dict[Any, list[int]] = {}  # what was asked -> what transformers said

    def prompt(self, *parts: Sequence[int] | Image.Image) -> tuple[list[int], Any]:
        """Tokens and images of a prompt whose parts are token ids and pictures."""
        ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, Image.Image):
                ids.append(self.processor.place_id)
                images.append(self.processor.process(part))
            else:
                ids += part
        whole, inputs = put_media(ids, images, IMAGE, "prompt", self.processor.place_id)
        return put_virtual_ids(np.array(whole, np.int32), inputs, IMAGE).tolist(), inputs

    def greedy(self, ids: Sequence[int], images: Any, max_tokens: int, **more: Any) -> list[int]:
        """What transformers' own ``generate`` says, with ``more`` settings.

        It is asked once for the same prompt, images and settings.
        """
        shown = [np.asarray(own).tobytes() for image in images for own in image.arrays.values()]
        key = (tuple(ids), tuple(shown), max_tokens, *more.items())
        if key not in self._said:
            self._said[key] = self._generate(ids, images, max_new_tokens=max_tokens, **more)
        return list(self._said[key])

    def _generate(self, ids: Sequence[int], images: Any, **settings: Any) -> list[int]:
        plain = torch.tensor([[IMAGE if token < VIRTUAL_TOKENS else token for token in ids]])
        fields: dict[str, Any] = {}
        if images:
            for name in images[0].arrays:
                arrays = [np.array(image.arrays[name]) for image in images]
                axis = 1 if self.family in ("idefics3", "smolvlm") else 0
                fields[name] = torch.from_numpy(np.concatenate(_padded(arrays), axis))
            if self.family.startswith("qwen"):
                fields["mm_token_type_ids"] = (plain == IMAGE).to(torch.int32)
        if self.family in ("gemma3", "paligemma"):
            is_image = (plain == IMAGE) & (self.family == "gemma3")
            fields["token_type_ids"] = is_image.to(torch.int64)
        output = self.model.generate(
            plain,
            attention_mask=torch.ones_like(plain),
            do_sample=False,
            pad_token_id=PAD,
            **fields,
            **settings,
        )
        tokens: list[int] = output[0, plain.shape[1] :].tolist()
        return tokens


def _padded(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Pads images [1, ...] to the largest one, as processors do."""
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) == 1 or arrays[0].ndim < 4:
        return arrays
    most = np.max([array.shape[1:] for array in arrays], axis=0)
    return [
        np.pad(a, [(0, 0), *((0, int(m - n)) for m, n in zip(most, a.shape[1:], strict=True))])
        for a in arrays
    ]
