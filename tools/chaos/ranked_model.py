"""A model whose layers several ranks can share: random weights, the demo model's tokens."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rayfin.deployments.serve.preflight import DEMO_FOLDER

SPREAD = 0.1
"""Of the weights. With 0.3 rounding grows from layer to layer, and one sampled token in 2,400 is
another one where sums are made in another order; with 0.1 none in 36,000 is."""


def make(folder: Path) -> None:
    """Saves it there."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=SPREAD,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_FOLDER).save_pretrained(folder)
