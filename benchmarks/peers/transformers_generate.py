"""transformers' ``generate`` on padded batches."""

from typing import Any

import torch
import transformers
from peer import Static, serve
from transformers import AutoModelForCausalLM


def load(model: str, settings: dict[str, Any]) -> Static:
    threads, batch = settings.get("threads"), int(settings.get("batch", 16))
    if threads:
        torch.set_num_threads(threads)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], lengths: list[int]) -> None:
        """Padded on the left; a batch runs until its longest output is done."""
        width, longest = max(map(len, prompts)), max(lengths)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        network.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=0,
        )

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        for start in range(0, len(prompts), batch):
            run(prompts[start : start + batch], lengths[start : start + batch])

    return Static(f"transformers {transformers.__version__}", generate)


if __name__ == "__main__":
    serve(load)
