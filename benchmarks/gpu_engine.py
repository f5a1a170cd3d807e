"""Whole engines on a GPU: shapes of real models with random weights, in tokens per second."""

import gc
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench
from gpu_floors import Floors
from shapes import SHAPES
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from rayfin import LLM, SamplingParams
from rayfin.deployments.bench.peers import Peer, PeerSpec
from rayfin.deployments.bench.workload import Job


def shape_of(bench: Bench, shape: str = "0.6b") -> tuple[str, dict[str, Any]]:
    """Architecture and sizes of the model that whole engines run."""
    architecture, sizes = SHAPES["135m" if bench.toy else shape]
    return architecture, sizes | ({"num_hidden_layers": 2, "vocab_size": 1000} if bench.toy else {})


def save_config(bench: Bench, folder: Path, shape: str = "0.6b") -> Any:
    architecture, sizes = shape_of(bench, shape)
    config = AutoConfig.for_model(
        architecture, tie_word_embeddings=True, max_position_embeddings=16384, **sizes
    )
    config.architectures = ["LlamaForCausalLM" if architecture == "llama" else "Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return config


def make_llm(bench: Bench, folder: Path, shape: str = "0.6b", **options: Any) -> LLM:
    """An LLM with random weights and without a tokenizer, inline by default."""
    save_config(bench, folder, shape)
    settings = {"executor": "inline"} | options
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=bench.device.type,
        dtype=str(bench.dtype).removeprefix("torch."),
        prefix_caching=False,
        **({"kv_cache_memory": 1 << 26, "max_model_len": 512} if bench.toy else {}),
        **settings,
    )


def make_jobs(shapes: list[tuple[int, int]], seed: int = 0) -> list[Job]:
    """Jobs of (prompt, output) tokens, all at once."""
    rng = random.Random(seed)
    return [Job(tuple(rng.randrange(10, 1000) for _ in range(n)), out) for n, out in shapes]


def timed(llm: LLM, shapes: list[tuple[int, int]], seed: int = 0) -> float:
    """Seconds for requests of (prompt, output) tokens, all at once."""
    jobs = make_jobs(shapes, seed)
    params = [
        SamplingParams(
            temperature=0.6, seed=i, max_tokens=job.output_tokens, ignore_eos=True, detokenize=False
        )
        for i, job in enumerate(jobs)
    ]
    started = time.perf_counter()
    llm.generate([list(job.prompt) for job in jobs], params, use_tqdm=False)
    return time.perf_counter() - started


def timed_peer(peer: Peer, shapes: list[tuple[int, int]], seed: int = 0) -> float:
    """Seconds for the same requests, greedily, on a peer."""
    started = time.perf_counter()
    peer.run(make_jobs(shapes, seed))
    return time.perf_counter() - started


def nano_trace() -> list[tuple[int, int]]:
    """The 256 requests of nano-vllm's ``bench.py``: 142,827 tokens in, 133,966 out.

    Its lengths depend on the tokens drawn between them.
    """
    rng = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(rng.randint(100, 1024))
        for _ in range(prompts[-1]):
            rng.randint(0, 10000)
    return [(prompt, rng.randint(100, 1024)) for prompt in prompts]


@dataclass(frozen=True)
class Workloads:
    """The workloads of every engine, as (prompt, output) tokens."""

    single: tuple[int, int]
    nano: list[tuple[int, int]]
    alike: list[tuple[int, int]]  # outputs of one length, as transformers requires
    decodes: list[tuple[int, int]]
    prompt: int

    @classmethod
    def of(cls, bench: Bench) -> "Workloads":
        output, nano = 512, nano_trace()
        if bench.toy:
            output, nano = 8, [(prompt // 50, out // 50) for prompt, out in nano[:4]]
        single = (32, 8 if bench.toy else 256)
        alike = [(prompt, output) for prompt, _ in nano]
        decodes = [single] * (2 if bench.toy else 32)
        return cls(single, nano, alike, decodes, 256 if bench.toy else 8192)


ROWS = {  # of the table -> key of a column
    "batch 1, ms a token (0.6 wanted)": "single",
    "256 requests of 100-1024 and as many, output tokens/s (24,000 wanted)": "nano",
    "256 requests of 100-1024 and 512, output tokens/s": "alike",
    "32 decodes beside a prompt of 8192, seconds more": "prompt",
}


def engine(bench: Bench) -> None:
    """Whole steps: batch 1, the workload of nano-vllm, a long prompt among decodes."""
    work = Workloads.of(bench)
    columns = {"floor": _floors(bench, work)}
    for name, options in (("with graphs", {}), ("--enforce-eager", {"enforce_eager": True})):
        with running(bench, **options) as llm:
            columns[name] = _engine_column(llm, work)
        del llm
        release(bench)
    name, column = _peer_column(bench, work)
    columns[name] = column
    print("\n## Whole engine, 0.6B shape, random weights, one process\n")
    print(f"| what | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for row, key in ROWS.items():
        print(f"| {row} | {' | '.join(column.get(key, '-') for column in columns.values())} |")


def _floors(bench: Bench, work: Workloads) -> dict[str, str]:
    """The lower bounds of the chip."""
    floors = Floors.of(shape_of(bench)[1], bench.bandwidth, bench.flops)
    prompt, output = work.single
    return {
        "single": f"{floors.decode([prompt + output // 2]) * 1e3:.3f}",
        "nano": f"{sum(out for _, out in work.nano) / floors.run(work.nano):.0f}",
        "alike": f"{sum(out for _, out in work.alike) / floors.run(work.alike):.0f}",
        "prompt": f"{floors.prefill(work.prompt):.3f}",
    }


def _engine_column(llm: LLM, work: Workloads) -> dict[str, str]:
    prompt, output = work.single
    one = (timed(llm, [work.single]) - timed(llm, [(prompt, 1)])) / (output - 1)
    nano, alike = timed(llm, work.nano, seed=1), timed(llm, work.alike, seed=2)
    without = timed(llm, work.decodes)
    with_prompt = timed(llm, [*work.decodes, (work.prompt, 1)])
    return {
        "single": f"{one * 1e3:.3f}",
        "nano": f"{sum(out for _, out in work.nano) / nano:.0f}",
        "alike": f"{sum(out for _, out in work.alike) / alike:.0f}",
        "prompt": f"{with_prompt - without:.3f}",
    }


def _peer_column(bench: Bench, work: Workloads) -> tuple[str, dict[str, str]]:
    """transformers' continuous batching, on the same device in another process."""
    script = Path(__file__).parent / "peers" / "transformers_cb.py"
    settings: dict[str, Any] = {
        "device": bench.device.type,
        "dtype": str(bench.dtype).split(".")[1],
    }
    if not bench.toy:
        settings |= {"num_blocks": 16384, "max_batch_tokens": 8192}
    spec = PeerSpec("transformers_cb", sys.executable, script, settings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = save_config(bench, folder)
        AutoModelForCausalLM.from_config(config, dtype=bench.dtype).save_pretrained(folder)
        with Peer(spec, folder, folder / "stderr") as peer:
            timed_peer(peer, [(16, 8)] * 4)  # warms up
            prompt, output = work.single
            one = timed_peer(peer, [work.single]) - timed_peer(peer, [(prompt, 1)])
            alike = timed_peer(peer, work.alike, seed=2)
            return f"{peer.version}, continuous batching", {
                "single": f"{one / (output - 1) * 1e3:.3f}",
                "alike": f"{sum(out for _, out in work.alike) / alike:.0f}",
            }


@contextmanager
def running(bench: Bench, shape: str = "0.6b", **options: Any) -> Iterator[LLM]:
    """A warmed-up engine, freed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        llm = make_llm(bench, Path(folder), shape, **options)
        timed(llm, [(16, 8)] * 4)
        yield llm
        llm.close()


def prefill(bench: Bench) -> None:
    """Prefill of a larger model, which is bound by computation rather than memory."""
    prompts = [(64 if bench.toy else 8192, 1)] * (2 if bench.toy else 8)
    with running(bench, "8b") as llm:
        timed(llm, prompts)
        took = min(timed(llm, prompts, seed) for seed in range(1, 3 if bench.toy else 6))
    del llm
    release(bench)
    tokens = sum(prompt for prompt, _ in prompts)
    floor = Floors.of(shape_of(bench, "8b")[1], bench.bandwidth, bench.flops).prefill(tokens)
    print("\n## Prefill, 8B shape, random weights, one process\n")
    print("Operations are those of the layers' weights; attention's are not counted.\n")
    print("| prompts | tokens/s | TFLOP/s | share of peak (0.6 wanted) |\n|---|---|---|---|")
    print(f"| {len(prompts)} of {prompts[0][0]} | {tokens / took:.0f} ", end="")
    print(f"| {floor * bench.flops / took / 1e12:.1f} | {floor / took:.2f} |")


def idle(bench: Bench) -> None:
    """The share of time that the device is idle during decoding, by torch's profiler."""
    on_gpu = bench.device.type == "cuda"
    print("\n## Idle device in steady decode, 0.6B shape\n")
    print("| rows | share of time without a kernel (under 0.02 wanted) |\n|---|---|")
    with running(bench) as llm:
        for rows in (1, 4) if bench.toy else (1, 32, 256):
            shapes = [(16, 16 if bench.toy else 512)] * rows
            timed(llm, shapes)
            activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
            with profile(activities=[activity]) as profiler:
                timed(llm, shapes)
            spans = [
                (event.time_range.start, event.time_range.end)
                for event in profiler.events()
                if (event.device_type == DeviceType.CUDA) == on_gpu
            ]
            print(f"| {rows} | {idle_share(spans):.3f} |")
    del llm
    release(bench)


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Of the time from a fifth to nine tenths of all, that in which none of (start, end) lies.

    What comes before is prompts, what comes after the rows' end.
    """
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    begin, until = first + 0.2 * (last - first), first + 0.9 * (last - first)
    busy, reached = 0.0, begin
    for start, end in sorted(spans):  # they may overlap
        start, end = max(start, reached), min(end, until)
        if end > start:
            busy += end - start
            reached = end
    return 1 - busy / (until - begin)


def actors(bench: Bench) -> None:
    """The workload of nano-vllm in one process, and with scheduler and runner as Ray actors."""
    shapes = Workloads.of(bench).nano
    tokens = sum(out for _, out in shapes)
    rates = {}
    for executor in ("inline", "ray"):  # one at a time: each takes the device's memory
        with running(bench, executor=executor) as llm:
            timed(llm, shapes, seed=1)
            rates[executor] = tokens / min(timed(llm, shapes, seed) for seed in (2, 3, 4))
        del llm
        release(bench)
    print("\n## Actors against one process, 0.6B shape, workload of nano-vllm\n")
    print("| inline, output tokens/s | actors | share (0.97 wanted) |\n|---|---|---|")
    inline, ray = rates["inline"], rates["ray"]
    print(f"| {inline:.0f} | {ray:.0f} | {ray / inline:.2f} |")


def release(bench: Bench) -> None:
    """Memory of engines without a reference, for the next one."""
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
