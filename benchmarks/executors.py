"""Offline throughput of one engine in this process and as Ray actors, taking turns.

python benchmarks/executors.py [--shape demo|135m] [--rounds 5]
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from rayfin import LLM, SamplingParams

REQUESTS = 64
PROMPT_TOKENS = (50, 400)
OUTPUT_TOKENS = (20, 120)


def settings(shape: str, folder: Path) -> dict[str, Any]:
    """What both executors load."""
    if shape == "demo":
        return {"model": "demo"}
    make_config: Any = LlamaConfig  # transformers leaves its constructor without types
    make_config(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}


def workload(vocabulary: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of random tokens and fixed output lengths; greedy."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(10, vocabulary) for _ in range(rng.randint(*PROMPT_TOKENS))]
        for _ in range(REQUESTS)
    ]
    params = [
        SamplingParams(
            temperature=0, max_tokens=rng.randint(*OUTPUT_TOKENS), ignore_eos=True, detokenize=False
        )
        for _ in prompts
    ]
    return prompts, params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("demo", "135m"), default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        common = settings(options.shape, Path(folder)) | {"threads": options.threads}
        engines = {name: LLM(executor=name, **common) for name in ("inline", "ray")}
        prompts, params = workload(2000)
        tokens = sum(own.max_tokens or 0 for own in params)
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(options.rounds + 1):
            for name, llm in engines.items():
                started = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                rates[name].append(tokens / (time.perf_counter() - started))
        print(
            f"{options.shape}: {REQUESTS} requests, {tokens} output tokens, {options.rounds} rounds"
        )
        inline, ray = (statistics.median(rates[name][1:]) for name in engines)
        for name in engines:
            print(f"  {name:7} {', '.join(f'{rate:.0f}' for rate in rates[name][1:])} tokens/s")
        print(f"  ray / inline: {ray / inline:.3f}")
        for llm in engines.values():
            llm.close()


if __name__ == "__main__":
    main()
