"""A model with random weights and the demo model's tokenizer that several ranks can share."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rayfin.deployments.serve.preflight import DEMO_FOLDER

SPREAD = 0.1
"""Standard deviation of the weights. With 0.3, rounding grows with each layer, and another order of
summation changes one sampled token in 2,400; with 0.1, none in 36,000."""


def make(folder: Path) -> None:
    """Saves the model to ``folder``."""
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
