"""Seconds of other programs to take the same files: transformers' load, vLLM's ``reload_weights``.

    python benchmarks/peers/reload.py transformers|vllm MODEL ROUNDS OTHER

Prints one number for each round, which alternates between the folders MODEL and OTHER.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def transformers_load(model: str) -> Callable[[str], object]:
    """The load of a model, all of whose bytes are read."""
    import torch
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM

    def load(folder: str) -> None:
        loaded = make.from_pretrained(folder, dtype=torch.float32)
        for parameter in loaded.parameters():
            parameter.sum()  # a load maps the files

    load(model)
    return load


def vllm_reload(model: str) -> Callable[[str], object]:
    """An update of an idle engine."""
    from vllm import LLM

    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=2048)
    return lambda folder: llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def main() -> None:
    kind, model, rounds, other = sys.argv[1:]
    take = (transformers_load if kind == "transformers" else vllm_reload)(model)
    for number in range(int(rounds)):
        begun = time.perf_counter()
        take((other, model)[number % 2])
        print(f"seconds {time.perf_counter() - begun:.4f}", flush=True)


if __name__ == "__main__":
    main()
