"""Offline throughput of one engine inline and as Ray actors, in turns.

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
    """The engine arguments of both executors."""
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


def workload(
    vocabulary: int, *, seed: int = 0, requests: int = REQUESTS
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts that differ by seed, and greedy sampling with fixed output lengths."""
    rng, lengths = random.Random(seed), random.Random(0)
    prompts = [
        [rng.randrange(10, vocabulary) for _ in range(lengths.randint(*PROMPT_TOKENS))]
        for _ in range(requests)
    ]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=lengths.randint(*OUTPUT_TOKENS),
            ignore_eos=True,
            detokenize=False,
        )
        for _ in prompts
    ]
    return prompts, params


def compare(
    shape: str, rounds: int, *, threads: int | None = None, requests: int = REQUESTS
) -> dict[str, list[float]]:
    """Returns the output tokens per second of each round, by executor.

    Both get the same prompts, which change in every round so that the prefix cache does not help.
    """
    with tempfile.TemporaryDirectory() as folder:
        common = settings(shape, Path(folder)) | {"threads": threads}
        engines = {name: LLM(executor=name, **common) for name in ("inline", "ray")}
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for round_ in range(rounds + 1):  # the first round is small and warms up
            count = requests if round_ else min(8, requests)
            prompts, params = workload(2000, seed=round_, requests=count)
            tokens = sum(each.max_tokens or 0 for each in params)
            for name, llm in engines.items():
                started = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                rates[name].append(tokens / (time.perf_counter() - started))
        for llm in engines.values():
            llm.close()
    return {name: rounds[1:] for name, rounds in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("demo", "135m"), default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    rates = compare(options.shape, options.rounds, threads=options.threads)
    print(f"{options.shape}: {REQUESTS} requests, {options.rounds} rounds")
    for name, values in rates.items():
        print(f"  {name:7} {', '.join(f'{rate:.0f}' for rate in values)} tokens/s")
    inline, ray = map(statistics.median, rates.values())
    print(f"  ray / inline: {ray / inline:.3f}")


if __name__ == "__main__":
    main()
