"""A tiny LLaVA with random weights and the demo model's tokenizer."""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, CLIPVisionConfig, LlamaConfig, LlavaConfig
from transformers import LlavaForConditionalGeneration as Llava

from rayfin.deployments.serve.preflight import DEMO_FOLDER

SPREAD = 0.1  # standard deviation of the weights: answers depend on the picture, and do not repeat
PIXELS, PATCH = 56, 7  # of a picture as the tower reads it: 64 tokens
PLACE = "<image>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make(folder: Path) -> None:
    """Saves the model, its tokenizer and its processor to ``folder``."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    tokenizer.add_special_tokens({"additional_special_tokens": [PLACE]})
    tokenizer.chat_template = TEMPLATE
    tower = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=PIXELS,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    config = LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(PLACE),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Llava(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, SPREAD)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    named = {"processor_class": "LlavaProcessor"}
    counted = {"patch_size": PATCH, "num_additional_image_tokens": 1, "image_token": PLACE}
    strategy = {"vision_feature_select_strategy": "default"}
    (folder / "processor_config.json").write_text(json.dumps({**named, **counted, **strategy}))
    sizes = {
        "size": {"shortest_edge": PIXELS},
        "crop_size": {"height": PIXELS, "width": PIXELS},
    }
    images = {**named, "image_processor_type": "CLIPImageProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
