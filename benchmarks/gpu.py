"""The GPU path: checked first, then timed beside what the chip can do.

    make bench-gpu
    python benchmarks/gpu.py --sections check,attention

Prints tables for docs/benchmarks/gpu.md. Floors are bytes or operations over what an H200
was measured to reach (`--bandwidth`, `--flops` for another chip). ``--toy`` runs tiny shapes on any
device, to see that the script works; its figures mean nothing.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_floors import Floors
from shapes import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

from rayfin import LLM, SamplingParams, __version__
from rayfin.deployments.bench.peers import Peer, PeerSpec
from rayfin.deployments.bench.workload import Job
from rayfin.kernels.attention.interface import PagedAttention, PagedBatch
from rayfin.kernels.attention.select import page_types, select_attention
from rayfin.kernels.attention.torch import paged_attention as torch_attention

PAGE_SIZE = 16
CONTEXTS = {  # name -> cached tokens of each decoding row
    "1 x 4096": [4096],
    "8 x 100-1024": "ragged 8",
    "64 x 100-1024": "ragged 64",
    "256 x 100-1024": "ragged 256",
    "256 x 1024": [1024] * 256,
}
MATRICES = {  # name -> (outputs, inputs)
    "0.6b gate, up": (6144, 1024),
    "0.6b head": (151936, 1024),
    "8b gate, up": (28672, 4096),
    "8b down": (4096, 14336),
}


@dataclass(frozen=True)
class Bench:
    """Where and how large."""

    device: torch.device
    dtype: torch.dtype
    bandwidth: float  # bytes/s
    flops: float
    toy: bool

    def seconds(self, run: Callable[[], object]) -> float:
        """The median of some runs of a queued operation."""
        for _ in range(1 if self.toy else 5):
            run()
        times = []
        for _ in range(2 if self.toy else 30):
            self.wait()
            started = time.perf_counter()
            if self.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                self.wait()
                times.append(start.elapsed_time(end) / 1e3)
            else:
                run()
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def lengths_of(spec: "list[int] | str", bench: Bench) -> list[int]:
    rng = random.Random(0)
    if isinstance(spec, str):
        spec = [rng.randint(100, 1024) for _ in range(int(spec.split()[1]))]
    return [length // 50 for length in spec[:4]] if bench.toy else spec


def make_batch(lengths: list[int], chunk: int, bench: Bench) -> PagedBatch:
    """Rows of ``chunk`` tokens that see ``lengths``, with pages that lie in any order."""
    pages = [-(-length // PAGE_SIZE) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for row, own in enumerate(order.split(pages)):
        tables[row, : len(own)] = own
    starts = np.arange(len(lengths) + 1, dtype=np.int32) * chunk
    kv_len = np.array(lengths, np.int32)
    tokens = torch.zeros(int(starts[-1]), dtype=torch.int64, device=bench.device)
    return PagedBatch(
        query_start=torch.from_numpy(starts).to(bench.device),
        kv_len=torch.from_numpy(kv_len).to(bench.device),
        page_tables=tables.to(bench.device),
        slots=tokens,
        positions=tokens,
        query_start_cpu=starts,
        kv_len_cpu=kv_len,
        decoding=len(lengths) if chunk == 1 else 0,
        page_size=PAGE_SIZE,
    )


class Layer:
    """Queries and pages of one layer of the 0.6B shape (or a small one)."""

    def __init__(
        self, batch: PagedBatch, bench: Bench, page_dtype: torch.dtype | None = None
    ) -> None:
        self.heads, self.kv_heads, self.dim = (4, 2, 16) if bench.toy else (16, 8, 128)
        torch.manual_seed(0)
        where: dict[str, Any] = {"dtype": bench.dtype, "device": bench.device}
        tokens, pages = int(batch.query_start_cpu[-1]), int(batch.page_tables.max()) + 1
        self.batch = batch
        self.query = torch.randn(tokens, self.heads, self.dim, **where)
        shape = (pages, PAGE_SIZE, self.kv_heads, self.dim)
        self.keys, self.values = (
            torch.randn(shape, **where).to(page_dtype or bench.dtype) for _ in range(2)
        )

    def run(self, attend: PagedAttention) -> torch.Tensor:
        scale = self.dim**-0.5
        return attend(self.query, self.keys, self.values, self.batch, scale=scale)


def check(bench: Bench) -> None:
    """The device's attention against torch's; fails loudly."""
    attend = select_attention(bench.device, bench.dtype)
    print("\n## Check\n")
    for pages in page_dtypes(attend, bench):
        for name, chunk in (("8 x 100-1024", 1), ("256 x 100-1024", 1), ("1 x 4096", 512)):
            lengths = lengths_of(CONTEXTS[name], bench)
            layer = Layer(make_batch(lengths, min(chunk, min(lengths)), bench), bench, pages)
            ours = layer.run(attend).float()
            layer.batch = replace(layer.batch, scratch={})
            theirs = layer.run(torch_attention).float()
            apart = float((ours - theirs).abs().max())
            print(f"- attention, {name}, {chunk} queries a row, {pages}: ", end="")
            print(f"at most {apart:.1e} from torch's")
            assert apart < 2e-2, "attention is wrong: nothing below would mean anything"


def page_dtypes(attend: PagedAttention, bench: Bench) -> list[torch.dtype]:
    """The type of the queries, and fp8 where the attention reads it."""
    read = page_types(attend)
    return [bench.dtype, *(dtype for dtype in read if dtype == torch.float8_e4m3fn)]


def attention(bench: Bench) -> None:
    attend = select_attention(bench.device, bench.dtype)
    print("\n## Attention of one layer, 0.6B shape, decode\n")
    print("| rows x context | pages | us | GB/s of pages | share of bandwidth | torch, us |")
    print("|---|---|---|---|---|---|")
    for name, spec in CONTEXTS.items():
        for pages in page_dtypes(attend, bench):
            lengths = lengths_of(spec, bench)
            layer = Layer(make_batch(lengths, 1, bench), bench, pages)
            kept = str(pages).removeprefix("torch.")
            moved = 2 * sum(lengths) * layer.kv_heads * layer.dim * pages.itemsize
            took = bench.seconds(lambda layer=layer: layer.run(attend))
            layer.batch = replace(layer.batch, scratch={})
            torch_took = bench.seconds(lambda layer=layer: layer.run(torch_attention))
            print(
                f"| {name} | {kept} | {took * 1e6:.1f} | {moved / took / 1e9:.0f} "
                f"| {moved / took / bench.bandwidth:.2f} | {torch_took * 1e6:.1f} |"
            )
    print("\n## Attention of one layer, 0.6B shape, prefill\n")
    print("| chunk after cached | ms | TFLOP/s | share of peak |\n|---|---|---|---|")
    for chunk, cached in ((2048, 0), (8192, 0), (512, 8192)):
        if bench.toy:
            chunk, cached = chunk // 128, cached // 128
        layer = Layer(make_batch([chunk + cached], chunk, bench), bench)
        took = bench.seconds(lambda layer=layer: layer.run(attend))
        pairs = chunk * cached + chunk * (chunk + 1) / 2
        operations = 4 * pairs * layer.heads * layer.dim
        share = operations / took / bench.flops
        print(
            f"| {chunk} after {cached} | {took * 1e3:.3f} | {operations / took / 1e12:.1f} ", end=""
        )
        print(f"| {share:.2f} |")


def matmul(bench: Bench) -> None:
    print("\n## Matrix products\n")
    print("| weight | rows | us | TFLOP/s | share of its floor |\n|---|---|---|---|---|")
    for name, (outputs, inputs) in MATRICES.items():
        if bench.toy:
            outputs, inputs = outputs // 64, inputs // 64
        weight = torch.randn(outputs, inputs, dtype=bench.dtype, device=bench.device)
        for rows in (1, 32, 256, 8192):
            if rows > 256 and (bench.toy or "head" in name):
                continue
            x = torch.randn(rows, inputs, dtype=bench.dtype, device=bench.device)
            took = bench.seconds(lambda x=x, weight=weight: F.linear(x, weight))
            operations, moved = 2 * rows * weight.numel(), weight.nbytes
            floor = max(operations / bench.flops, moved / bench.bandwidth)
            print(f"| {name} | {rows} | {took * 1e6:.1f} | {operations / took / 1e12:.1f} ", end="")
            print(f"| {floor / took:.2f} |")


def shape_of(bench: Bench) -> tuple[str, dict[str, Any]]:
    """Architecture and sizes of the model that whole engines run."""
    architecture, sizes = SHAPES["135m" if bench.toy else "0.6b"]
    return architecture, sizes | ({"num_hidden_layers": 2, "vocab_size": 1000} if bench.toy else {})


def save_config(bench: Bench, folder: Path) -> Any:
    architecture, sizes = shape_of(bench)
    config = AutoConfig.for_model(
        architecture, tie_word_embeddings=True, max_position_embeddings=16384, **sizes
    )
    config.architectures = ["LlamaForCausalLM" if bench.toy else "Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return config


def make_llm(bench: Bench, folder: Path, **options: Any) -> LLM:
    """The 0.6B shape with random weights in this process, its prompts given as tokens."""
    save_config(bench, folder)
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        executor="inline",
        device=bench.device.type,
        dtype=str(bench.dtype).removeprefix("torch."),
        prefix_caching=False,
        **({"kv_cache_memory": 1 << 26, "max_model_len": 512} if bench.toy else {}),
        **options,
    )


def make_jobs(shapes: list[tuple[int, int]], seed: int = 0) -> list[Job]:
    """Requests of (prompt, output) tokens, all at once."""
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
    """The same, greedily, for a peer."""
    started = time.perf_counter()
    peer.run(make_jobs(shapes, seed))
    return time.perf_counter() - started


@dataclass(frozen=True)
class Workloads:
    """What every engine runs, as (prompt, output) tokens."""

    single: tuple[int, int]
    nano: list[tuple[int, int]]
    alike: list[tuple[int, int]]  # outputs of one length, which is all that transformers takes
    decodes: list[tuple[int, int]]
    prompt: int

    @classmethod
    def of(cls, bench: Bench) -> "Workloads":
        rng, longest = random.Random(0), 20 if bench.toy else 1024
        requests, output = (4, 8) if bench.toy else (256, 512)
        nano = [
            (rng.randint(longest // 10, longest), rng.randint(longest // 10, longest))
            for _ in range(requests)
        ]
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
        with tempfile.TemporaryDirectory() as folder:
            llm = make_llm(bench, Path(folder), **options)
            columns[name] = _engine_column(llm, work)
            llm.close()
            del llm
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
    name, column = _peer_column(bench, work)
    columns[name] = column
    print("\n## Whole engine, 0.6B shape, random weights, one process\n")
    print(f"| what | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for row, key in ROWS.items():
        print(f"| {row} | {' | '.join(column.get(key, '-') for column in columns.values())} |")


def _floors(bench: Bench, work: Workloads) -> dict[str, str]:
    """What the chip could do at best."""
    floors = Floors.of(shape_of(bench)[1], bench.bandwidth, bench.flops)
    prompt, output = work.single
    return {
        "single": f"{floors.decode([prompt + output // 2]) * 1e3:.3f}",
        "nano": f"{sum(out for _, out in work.nano) / floors.run(work.nano):.0f}",
        "alike": f"{sum(out for _, out in work.alike) / floors.run(work.alike):.0f}",
        "prompt": f"{floors.prefill(work.prompt):.3f}",
    }


def _engine_column(llm: LLM, work: Workloads) -> dict[str, str]:
    timed(llm, [(16, 8)] * 4)  # warms up
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
    """transformers' continuous batching, on the same device in a process of its own."""
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


SECTIONS = {"check": check, "attention": attention, "matmul": matmul, "engine": engine}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sections", default=",".join(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes/s of the chip")
    parser.add_argument("--flops", type=float, default=790e12, help="16-bit operations/s")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, on any device")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.toy:
        parser.error("there is no GPU here; --toy shows that the script works")
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{name}, torch {torch.__version__}, rayfin {__version__}")
    bench = Bench(device, dtype, args.bandwidth, args.flops, args.toy)
    for section in args.sections.split(","):
        SECTIONS[section](bench)


if __name__ == "__main__":
    main()
