"""transformers' own continuous batching, ``generate_batch``."""

from typing import Any

import torch
import transformers
from peer import Static, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


def load(model: str, settings: dict[str, Any]) -> Static:
    if threads := settings.get("threads"):
        torch.set_num_threads(threads)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation="paged|sdpa"
    )
    network = network.eval().to(settings.get("device", "cpu"))

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        """Uses the longest output length for all: ``generate_batch`` has no length per request."""
        config = GenerationConfig(
            max_new_tokens=max(lengths), do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        network.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=settings.get("num_blocks", 128),
                max_batch_tokens=settings.get("max_batch_tokens", 1024),
            ),
            persistent_manager=True,
        )

    return Static(f"transformers {transformers.__version__}", generate)


if __name__ == "__main__":
    serve(load)
