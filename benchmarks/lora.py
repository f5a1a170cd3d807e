"""What LoRA adapters cost: W1 of engines.py for the base model, and with eight adapters.

    python benchmarks/lora.py [--peer /opt/vllm/bin/python] [--rounds 3]
    python benchmarks/lora.py --prompt 20-130 --output 7-40     # W1 at a third of its lengths

Rayfin runs without adapters, with --enable-lora and no adapter, and with --count adapters that
requests take in turn; vLLM, with ``--peer``, with the same adapters. They take turns in one run.
Prints output tokens a second, and each divided by the base model's.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engines import VOCABULARY, make_model
from safetensors.torch import save_file
from shapes import SHAPES
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from turns import PEERS, PeerSpec, take_turns

from rayfin.deployments.bench.measures import Timeline, figures
from rayfin.deployments.bench.report import median
from rayfin.deployments.bench.workload import Lengths, random_jobs


def make_adapters(folder: Path, model: Path, count: int, rank: int, dtype: torch.dtype) -> None:
    """Writes adapters for all linear layers but the head, as peft does, with random A and B."""
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    head = shape.get_output_embeddings()
    linears = {
        name: own
        for name, own in shape.named_modules()
        if isinstance(own, nn.Linear) and own is not head
    }
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in linears}),
    }
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for name, own in linears.items():
            for letter, size in (("A", (rank, own.in_features)), ("B", (own.out_features, rank))):
                values = torch.randn(*size, generator=generator) / own.in_features**0.5
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = values.to(dtype)
        own_folder = folder / f"adapter-{number}"
        own_folder.mkdir(parents=True)
        save_file(tensors, own_folder / "adapter_model.safetensors")
        (own_folder / "adapter_config.json").write_text(json.dumps(config))


def specs(options: argparse.Namespace, adapters: Path) -> list[PeerSpec]:
    """The engines of a run, the base model first."""
    ours = PEERS / "rayfin_engine.py"
    plain: dict[str, Any] = {"max_model_len": 4096, "threads": options.threads}
    limits = {"max_lora_rank": options.rank, "max_loras": options.count}
    with_adapters = {**limits, "adapters": str(adapters)}
    found = [
        PeerSpec("base", sys.executable, ours, plain),
        PeerSpec("enabled", sys.executable, ours, {**plain, **limits}),
        PeerSpec("adapters", sys.executable, ours, {**plain, **with_adapters}),
    ]
    if options.peer:
        theirs = {"max_model_len": 4096, "enable_lora": True, **with_adapters}
        found.append(PeerSpec("vllm", options.peer, PEERS / "vllm_cpu.py", theirs))
    return [spec for spec in found if spec.name in options.only]


def rows(runs: dict[str, list[list[Timeline]]]) -> list[str]:
    """A line for each engine: output tokens a second, ITL p99, and shares of the first one."""
    lines, first = [], 0.0
    for name, rounds in runs.items():
        results = [figures(own) for own in rounds]
        assert not any(own.failed for own in results), results[0].errors
        speed = median([own.output_per_second for own in results])
        first = first or speed
        gap = 1000 * median([own.itl.p99 or 0.0 for own in results])
        lines.append(f"{name:10} {speed:8.1f} tokens/s  {speed / first:5.2f}  p99 gap {gap:.0f} ms")
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer", help="Python of an environment with vLLM")
    parser.add_argument("--only", nargs="+", default=["base", "enabled", "adapters", "vllm"])
    parser.add_argument("--count", type=int, default=8, help="adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", default="50-400", help="tokens of a prompt")
    parser.add_argument("--output", default="20-120", help="tokens of an output")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    prompt, output = (Lengths.parse(getattr(options, own), own) for own in ("prompt", "output"))
    jobs = random_jobs(options.requests, prompt, output, vocabulary=VOCABULARY)
    with tempfile.TemporaryDirectory() as folder:
        model, adapters = Path(folder) / "model", Path(folder) / "adapters"
        make_model(model, options.shape, options.weights)
        dtype = getattr(torch, options.weights)
        make_adapters(adapters, model, options.count, options.rank, dtype)
        runs = take_turns(specs(options, adapters), model, jobs, options.rounds, print)
    print(*rows(runs), sep="\n")


if __name__ == "__main__":
    main()
