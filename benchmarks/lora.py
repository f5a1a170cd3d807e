"""What LoRA adapters cost: requests that use them, and streams beside one that is read.

    python benchmarks/lora.py requests [--peer /opt/vllm/bin/python] [--rounds 3]
    python benchmarks/lora.py requests --prompt 20-130 --output 7-40   # a third of W1's
    python benchmarks/lora.py load [--streams 32] [--rounds 4] [--seconds 6] [--rank 8]

requests: W1 of engines.py. Rayfin runs without adapters, with --enable-lora and no adapter, and
with --count adapters that requests take in turn; vLLM, with ``--peer``, with the same adapters.
They take turns in one run. Prints output tokens a second, and each divided by the base model's.
load: a server with --lora-dir has the 135M shape with random weights; an adapter of rank 8 for all
linear layers has 9.8 MB. Streams of the base model go on all the time. Phases take turns: the
streams alone, beside a request for one token every --pause seconds with an adapter that the engine
holds ("known"), and with one that no process has read ("new"). Prints the gaps between a stream's
tokens by phase, and the time to the first token of requests.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from engines import VOCABULARY, make_model
from safetensors.torch import save_file
from sections import run
from server import served
from shapes import SHAPES
from structured import make_model as make_words_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from turns import PEERS, PeerSpec, take_turns

from rayfin.deployments.bench.endpoint import stream_pieces
from rayfin.deployments.bench.measures import Timeline, figures
from rayfin.deployments.bench.report import median
from rayfin.deployments.bench.workload import Lengths, random_jobs


def make_adapters(folder: Path, model: Path, count: int, rank: int, dtype: torch.dtype) -> None:
    """Writes adapters for all linear layers but the head, as peft does, with random A and B."""
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    head = shape.get_output_embeddings()
    linears = {
        name: module
        for name, module in shape.named_modules()
        if isinstance(module, nn.Linear) and module is not head
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
        for name, linear in linears.items():
            for letter, size in (
                ("A", (rank, linear.in_features)),
                ("B", (linear.out_features, rank)),
            ):
                values = torch.randn(*size, generator=generator) / linear.in_features**0.5
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
    listed = [
        PeerSpec("base", sys.executable, ours, plain),
        PeerSpec("enabled", sys.executable, ours, {**plain, **limits}),
        PeerSpec("adapters", sys.executable, ours, {**plain, **with_adapters}),
    ]
    if options.peer:
        theirs = {"max_model_len": 4096, "enable_lora": True, **with_adapters}
        listed.append(PeerSpec("vllm", options.peer, PEERS / "vllm_cpu.py", theirs))
    return [spec for spec in listed if spec.name in options.only]


def request_rows(runs: dict[str, list[list[Timeline]]]) -> list[str]:
    """A line for each engine: output tokens a second, ITL p99, and shares of the first one."""
    lines, first = [], 0.0
    for name, rounds in runs.items():
        results = [figures(timelines) for timelines in rounds]
        assert not any(result.failed for result in results), results[0].errors
        speed = median([result.output_per_second for result in results])
        first = first or speed
        gap = 1000 * median([result.itl.p99 or 0.0 for result in results])
        lines.append(f"{name:10} {speed:8.1f} tokens/s  {speed / first:5.2f}  p99 gap {gap:.0f} ms")
    return lines


def parse_requests(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
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


def requests() -> None:
    options = parse_requests()
    prompt, output = (Lengths.parse(getattr(options, name), name) for name in ("prompt", "output"))
    jobs = random_jobs(options.requests, prompt, output, vocabulary=VOCABULARY)
    with tempfile.TemporaryDirectory() as folder:
        model, adapters = Path(folder) / "model", Path(folder) / "adapters"
        make_model(model, options.shape, options.weights)
        dtype = getattr(torch, options.weights)
        make_adapters(adapters, model, options.count, options.rank, dtype)
        runs = take_turns(specs(options, adapters), model, jobs, options.rounds, print)
    print(*request_rows(runs), sep="\n")


PHASES = ("alone", "known", "new")
GAP, FIRST = 1.2, 0.5  # bars: p99 of gaps beside loads / alone; seconds to a first token
MODEL_LEN = 4096
PROMPT = 16


@dataclass(slots=True)
class Phase:
    """What was seen while one kind of request came."""

    gaps: list[float] = field(default_factory=list)  # seconds between a stream's tokens
    first: list[float] = field(default_factory=list)  # seconds to a request's first token


@dataclass(slots=True)
class Stream:
    """When the tokens of a stream came."""

    times: list[float] = field(default_factory=list)

    async def run(self, api: httpx.AsyncClient, model: str, seed: int) -> None:
        body = body_of(model, seed, MODEL_LEN - PROMPT)
        async for _ in stream_pieces(api, "/completions", body):
            self.times.append(time.perf_counter())


def body_of(model: str, seed: int, tokens: int) -> dict[str, object]:
    return {
        "model": model,
        "prompt": [300 + (7 * place + 13 * seed) % 9000 for place in range(PROMPT)],
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,  # an event for each token, also for parts of characters
        "stream": True,
    }


def gaps_within(times: Sequence[float], start: float, end: float) -> list[float]:
    """The gaps that lie between two times."""
    return [
        after - before
        for before, after in itertools.pairwise(times)
        if start <= before and after < end
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Milliseconds."""
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def first_token(api: httpx.AsyncClient, model: str, seed: int) -> float:
    started = time.perf_counter()
    async for _ in stream_pieces(api, "/completions", body_of(model, seed, 1)):
        return time.perf_counter() - started
    raise AssertionError(f"{model} said nothing")


async def phase(
    api: httpx.AsyncClient, names: Iterator[str], options: argparse.Namespace, seen: Phase
) -> None:
    """Asks one adapter after the other until the phase is over."""
    end = time.perf_counter() + options.seconds
    for seed in itertools.count(1000):
        due = time.perf_counter() + options.pause
        if due > end:
            break
        seen.first.append(await first_token(api, next(names), seed))
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    await asyncio.sleep(max(0.0, end - time.perf_counter()))


async def measure(url: str, base: str, options: argparse.Namespace) -> dict[str, Phase]:
    phases = {name: Phase() for name in PHASES}
    fresh = (f"adapter-{number}" for number in itertools.count(1))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"{url}/v1", timeout=120, limits=limits) as api:
        await first_token(api, "adapter-0", 0)
        streams = [Stream() for _ in range(options.streams)]
        tasks = [
            asyncio.create_task(stream.run(api, base, seed))
            for seed, stream in enumerate(streams, 1)
        ]
        while not all(len(stream.times) > 2 for stream in streams):
            await asyncio.sleep(0.1)
        for _, name in itertools.product(range(options.rounds), PHASES):
            started = time.perf_counter()
            if name == "alone":
                await asyncio.sleep(options.seconds)
            else:
                names = itertools.repeat("adapter-0") if name == "known" else fresh
                await phase(api, names, options, phases[name])
            ended = time.perf_counter()
            for stream in streams:
                phases[name].gaps += gaps_within(stream.times, started, ended)
        assert not any(task.done() for task in tasks), "a stream has ended: fewer rounds"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return phases


def load_rows(phases: Mapping[str, Phase]) -> list[str]:
    """A row of Markdown for each phase."""
    lines = [
        "| streams | gap p50, ms | p99 | p99 / alone | requests | first token p50, ms | longest |",
        "|---|---|---|---|---|---|---|",
    ]
    alone = quantile(phases["alone"].gaps, 0.99)
    for name, phase in phases.items():
        p50, p99 = quantile(phase.gaps, 0.5), quantile(phase.gaps, 0.99)
        first = ["", ""]
        if phase.first:
            first = [
                f"{1000 * statistics.median(phase.first):.0f}",
                f"{1000 * max(phase.first):.0f}",
            ]
        cells = [name, f"{p50:.1f}", f"{p99:.1f}", f"{p99 / alone:.2f}", str(len(phase.first))]
        lines.append(f"| {' | '.join(cells + first)} |")
    return lines


def verdicts(phases: Mapping[str, Phase]) -> list[str]:
    """A line for each bar."""
    alone, new = (quantile(phases[name].gaps, 0.99) for name in ("alone", "new"))
    longest = max(phases["new"].first)
    return [
        f"p99 of gaps beside loads / alone: {new / alone:.2f} (at most {GAP})",
        f"first token of an adapter that is read: {longest:.2f} s (at most {FIRST})",
    ]


def parse_load(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a phase")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds between requests")
    parser.add_argument("--rank", type=int, default=8)
    return parser.parse_args(arguments)


def load() -> None:
    options = parse_load()
    count = 1 + options.rounds * (int(options.seconds / options.pause) + 1)
    with tempfile.TemporaryDirectory() as folder:
        model, adapters = Path(folder) / "model", Path(folder) / "adapters"
        make_words_model(model)
        make_adapters(adapters, model, count, options.rank, torch.float32)
        file = adapters / "adapter-0" / "adapter_model.safetensors"
        print(f"an adapter has {file.stat().st_size / 1e6:.1f} MB", flush=True)
        flags = ["--lora-dir", str(adapters), "--max-lora-rank", str(max(options.rank, 8))]
        flags += ["--max-loras", "8", "--max-model-len", str(MODEL_LEN)]
        flags += ["--max-decoding-batch", str(options.streams + 8), "--served-model-name", "base"]
        with served(str(model), *flags) as url:
            phases = asyncio.run(measure(url, "base", options))
    print(*load_rows(phases), *verdicts(phases), sep="\n")


if __name__ == "__main__":
    run(__doc__, requests, load)
