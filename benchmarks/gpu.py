"""Checks the GPU path, then times it against the chip's limits.

    make bench-gpu
    python benchmarks/gpu.py --sections check,attention

Prints tables for docs/benchmarks/gpu.md. Floors are bytes or operations over what an H200
was measured to reach (`--bandwidth`, `--flops` for another chip). ``--toy`` runs tiny shapes on any
device, to see that the script works; its figures mean nothing.
"""

import argparse
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_bench import Bench
from gpu_engine import actors, engine, idle, prefill

from rayfin import __version__
from rayfin.kernels.attention.select import page_types, select_attention
from rayfin.kernels.attention.torch_backend import paged_attention as torch_attention
from rayfin.kernels.shapes import PagedAttention, PagedBatch

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


def lengths_of(spec: "list[int] | str", bench: Bench) -> list[int]:
    rng = random.Random(0)
    if isinstance(spec, str):
        spec = [rng.randint(100, 1024) for _ in range(int(spec.split()[1]))]
    return [length // 50 for length in spec[:4]] if bench.toy else spec


def make_batch(lengths: list[int], chunk: int, bench: Bench) -> PagedBatch:
    """Rows of ``chunk`` tokens that see ``lengths``, with pages in random order."""
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
    """Compares the device's attention with torch's; raises if they differ."""
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
    """The dtype of the queries, and fp8 if the attention supports it."""
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


SECTIONS = {
    "check": check,
    "attention": attention,
    "matmul": matmul,
    "engine": engine,
    "prefill": prefill,
    "idle": idle,
    "actors": actors,
}


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
