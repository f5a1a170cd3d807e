"""Whole engines on a GPU: shapes of real models with random weights, in tokens per second."""

import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench
from gpu_floors import Floors
from gpu_paths import Paths, runner_of
from shapes import SHAPES
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM
from turns import Peer, PeerSpec

from rayfin import LLM, SamplingParams
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
    if bench.toy:
        settings |= {"kv_cache_memory": 1 << 26, "max_model_len": 512}
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=bench.device.type,
        dtype=str(bench.dtype).removeprefix("torch."),
        prefix_caching=False,
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


COLUMNS = (
    "engine",
    "batch 1, ms a token (0.75 wanted)",
    "256 requests of 100-1024 and as many, output tokens/s (24,000 wanted)",
    "256 requests of 100-1024 and 512, output tokens/s",
    "32 decodes beside a prompt of 8192, seconds more",
)


def engine(bench: Bench) -> None:
    """Whole steps: batch 1, the workload of nano-vllm, a long prompt among decodes."""
    _engine_table(bench, {"with graphs": {}, "--enforce-eager": {"enforce_eager": True}})


def graphs(bench: Bench) -> None:
    """The row of ``engine`` with graphs alone."""
    _engine_table(bench, {"with graphs": {}})


def fp8(bench: Bench) -> None:
    """The row of ``engine`` with graphs and fp8 pages; on a GPU only."""
    if not bench.on_gpu:
        print("\n(no fp8 pages without a GPU)")
        return
    _engine_table(bench, {"with graphs and fp8 pages": {"kv_cache_dtype": "fp8"}})


def _engine_table(bench: Bench, engines: dict[str, dict[str, Any]]) -> None:
    work = Workloads.of(bench)
    title = "Whole engine, 0.6B shape, random weights, one process"
    table = bench.table("engine", title, COLUMNS)
    table.add("floor", *_floors(bench, work))
    for name, options in engines.items():
        with running(bench, **options) as llm:
            paths = Paths(llm)
            row = _engine_row(llm, work, lambda row: bench.keep("engine", row))  # each at once
            prompts = {"steps with prompts": paths.prompts, "seconds": paths.prompt_seconds}
            bench.keep("engine", prompts | {"decode steps": paths.replayed + paths.eager})
            if bench.on_gpu:
                paths.expect(graphs="enforce_eager" not in options)
        table.add(name, *row)
        del llm, paths
        release(bench)


def _floors(bench: Bench, work: Workloads) -> list[str]:
    """The lower bounds of the chip."""
    floors = Floors.of(shape_of(bench)[1], bench.bandwidth, bench.flops)
    prompt, output = work.single
    return [
        f"{floors.decode([prompt + output // 2]) * 1e3:.3f}",
        f"{sum(out for _, out in work.nano) / floors.run(work.nano):.0f}",
        f"{sum(out for _, out in work.alike) / floors.run(work.alike):.0f}",
        f"{floors.prefill(work.prompt):.3f}",
    ]


def _engine_row(llm: LLM, work: Workloads, keep: Callable[[dict[str, object]], None]) -> list[str]:
    """The values of the columns; ``keep`` gets each as soon as it is there."""
    row: list[str] = []

    def add(value: float, places: int) -> None:
        row.append(f"{value:.{places}f}")
        keep({COLUMNS[len(row)]: row[-1]})

    prompt, output = work.single
    add((timed(llm, [work.single]) - timed(llm, [(prompt, 1)])) / (output - 1) * 1e3, 3)
    add(sum(out for _, out in work.nano) / timed(llm, work.nano, seed=1), 0)
    add(sum(out for _, out in work.alike) / timed(llm, work.alike, seed=2), 0)
    without = timed(llm, work.decodes)
    add(timed(llm, [*work.decodes, (work.prompt, 1)]) - without, 3)
    return row


def peer(bench: Bench) -> None:
    """transformers' continuous batching, on the same device in another process.

    A peer that fails is a row that says so, and takes no other section's with it.
    """
    columns = ("engine", COLUMNS[1], COLUMNS[3])
    table = bench.table("peer", "transformers' continuous batching, 0.6B shape", columns)
    try:
        version, single, alike = _peer_row(bench, Workloads.of(bench))
    except Exception as error:
        table.add("transformers", "failed", str(error).splitlines()[0][:80])
        return
    table.add(version, single, alike)


def _peer_row(bench: Bench, work: Workloads) -> tuple[str, str, str]:
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
        with Peer(spec, folder, folder / "stderr") as running_peer:
            timed_peer(running_peer, [(16, 8)] * 4)  # warms up
            prompt, output = work.single
            one = timed_peer(running_peer, [work.single]) - timed_peer(running_peer, [(prompt, 1)])
            alike = timed_peer(running_peer, work.alike, seed=2)
            return (
                f"{running_peer.version}, continuous batching",
                f"{one / (output - 1) * 1e3:.3f}",
                f"{sum(out for _, out in work.alike) / alike:.0f}",
            )


@contextmanager
def running(bench: Bench, shape: str = "0.6b", **options: Any) -> Iterator[LLM]:
    """A warmed-up engine, freed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        llm = make_llm(bench, Path(folder), shape, **options)
        try:
            timed(llm, [(16, 8)] * 4)
            yield llm
        finally:
            llm.close()


def prefill(bench: Bench) -> None:
    """Prefill of a larger model, which is bound by computation rather than memory."""
    prompts = [(64 if bench.toy else 8192, 1)] * (2 if bench.toy else 8)
    with running(bench, "8b") as llm:
        if bench.on_gpu:
            assert runner_of(llm)._loaded.gpu_model is not None, "on transformers' modules"
        timed(llm, prompts)
        took = min(timed(llm, prompts, seed) for seed in range(1, 3 if bench.toy else 6))
    del llm
    release(bench)
    tokens = sum(prompt for prompt, _ in prompts)
    floor = Floors.of(shape_of(bench, "8b")[1], bench.bandwidth, bench.flops).prefill(tokens)
    table = bench.table(
        "prefill",
        "Prefill, 8B shape, random weights, one process",
        ("prompts", "tokens/s", "TFLOP/s", "share of peak (0.6 wanted)"),
        "Operations are those of the layers' weights; attention's are not counted.",
    )
    rate = f"{floor * bench.flops / took / 1e12:.1f}"
    what = f"{len(prompts)} of {prompts[0][0]}"
    table.add(what, f"{tokens / took:.0f}", rate, f"{floor / took:.2f}")


def idle(bench: Bench) -> None:
    """The share of time that the device is idle during decoding.

    Of the time of a run without a profiler, since that slows the host: kernels by their time in
    torch's profiler. A run of one token each is taken off both.
    """
    columns = ("rows", "ms a step", "share of time without a kernel (under 0.02 wanted)")
    table = bench.table("idle", "Idle device in steady decode, 0.6B shape", columns)
    prompt, output = 16, 16 if bench.toy else 128
    with running(bench) as llm:
        paths = Paths(llm)
        for rows in (1, 4) if bench.toy else (1, 32, 256):
            took, busy = [], []
            for tokens in (1, output):
                shapes = [(prompt, tokens)] * rows
                timed(llm, shapes)
                took.append(min(timed(llm, shapes) for _ in range(2)))
                busy.append(_busy_in(bench, llm, shapes))
            seconds = took[1] - took[0]
            share = max(1 - (busy[1] - busy[0]) / seconds, 0.0)
            table.add(rows, f"{seconds / (output - 1) * 1e3:.3f}", f"{share:.3f}")
        if bench.on_gpu:
            paths.expect(graphs=True)
    del llm, paths
    release(bench)


def prompts(bench: Bench) -> None:
    """Steps of one short prompt each, beside the time of their kernels: the rest is the host's."""
    columns = ("tokens", "ms, with scheduling and sampling", "ms of kernels")
    table = bench.table("prompts", "A step of one prompt, 0.6B shape", columns)
    with running(bench) as llm:
        model = runner_of(llm)._loaded.gpu_model
        assert not bench.on_gpu or (model is not None and model.replay is not None), "no graphs"
        for tokens in (16, 64) if bench.toy else (16, 64, 256, 512, 1024, 4096):
            shapes = [(tokens, 1)]
            timed(llm, shapes)
            took = min(timed(llm, shapes, seed) for seed in range(2 if bench.toy else 10))
            busy = _busy_in(bench, llm, shapes)
            table.add(tokens, f"{took * 1e3:.2f}", f"{busy * 1e3:.2f}")
    del llm, model
    release(bench)


def _busy_in(bench: Bench, llm: LLM, shapes: list[tuple[int, int]]) -> float:
    activity = ProfilerActivity.CUDA if bench.on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        timed(llm, shapes)
    return busy_seconds(
        [
            (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
            for event in profiler.events()
            if (event.device_type == DeviceType.CUDA) == bench.on_gpu
        ]
    )


def busy_seconds(spans: list[tuple[float, float]]) -> float:
    """The time that any of (start, end) covers; they may overlap."""
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        start = max(start, reached)
        if end > start:
            busy += end - start
            reached = end
    return busy


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
    title = "Actors against one process, 0.6B shape, workload of nano-vllm"
    columns = ("inline, output tokens/s", "actors", "share (0.97 wanted)")
    inline, ray = rates["inline"], rates["ray"]
    bench.table("actors", title, columns).add(f"{inline:.0f}", f"{ray:.0f}", f"{ray / inline:.2f}")


def release(bench: Bench) -> None:
    """Memory of engines without a reference, for the next one."""
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
