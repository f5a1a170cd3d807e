"""Attention of one layer: against torch's, against bandwidth and peak, and over tile sizes."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpu_bench import Bench

from rayfin.kernels.attention.select import page_types, select_attention
from rayfin.kernels.attention.torch_backend import paged_attention as torch_attention
from rayfin.kernels.shapes import PagedAttention, PagedBatch

PAGE_SIZE = 16
CONTEXTS: dict[str, list[int] | str] = {  # name -> cached tokens of each decoding row
    "1 x 4096": [4096],
    "8 x 100-1024": "ragged 8",
    "8 x 1024": [1024] * 8,
    "32 x 1024": [1024] * 32,
    "64 x 100-1024": "ragged 64",
    "80 x 1024": [1024] * 80,
    "256 x 100-1024": "ragged 256",
    "256 x 1024": [1024] * 256,
}
SPLIT, RAGGED = "1 x 4096", "256 x 100-1024"
REPEATS = 500
KERNEL = "attend_tiles"


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
    for row, row_pages in enumerate(order.split(pages)):
        tables[row, : len(row_pages)] = row_pages
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


def check_attention(bench: Bench) -> None:
    """Compares the device's attention with torch's; raises if they differ."""
    attend = select_attention(bench.device, bench.dtype)
    columns = ("rows x context", "queries a row", "pages", "largest difference")
    table = bench.table("check", "Check: attention against torch's", columns)
    for pages in page_dtypes(attend, bench):
        for name, chunk in (("8 x 100-1024", 1), (RAGGED, 1), (SPLIT, 512)):
            lengths = lengths_of(CONTEXTS[name], bench)
            layer = Layer(make_batch(lengths, min(chunk, min(lengths)), bench), bench, pages)
            bench.expect(KERNEL, lambda layer=layer: layer.run(attend))  # type: ignore[misc]
            ours = layer.run(attend).float()
            layer.batch = replace(layer.batch, scratch={})
            theirs = layer.run(torch_attention).float()
            apart = float((ours - theirs).abs().max())
            table.add(name, chunk, _name(pages), f"{apart:.1e}")
            assert apart < 2e-2, "attention is wrong: nothing below would mean anything"
    layer = Layer(make_batch(lengths_of(CONTEXTS[SPLIT], bench), 1, bench), bench)
    first = layer.run(attend)
    repeats = 3 if bench.toy else REPEATS
    for _ in range(repeats):
        assert torch.equal(layer.run(attend), first), "a split row differs: the merge races"
    table.add(SPLIT, 1, f"{repeats} times", "the same bits")


def page_dtypes(attend: PagedAttention, bench: Bench) -> list[torch.dtype]:
    """The dtype of the queries, and fp8 if the attention supports it."""
    read = page_types(attend)
    return [bench.dtype, *(dtype for dtype in read if dtype == torch.float8_e4m3fn)]


def attention(bench: Bench) -> None:
    attend = select_attention(bench.device, bench.dtype)
    columns = ("rows x context", "pages", "us", "GB/s of pages", "share of bandwidth", "torch, us")
    table = bench.table("attention", "Attention of one layer, 0.6B shape, decode", columns)
    for name, spec in CONTEXTS.items():
        for pages in page_dtypes(attend, bench):
            lengths = lengths_of(spec, bench)
            layer = Layer(make_batch(lengths, 1, bench), bench, pages)
            moved = 2 * sum(lengths) * layer.kv_heads * layer.dim * pages.itemsize
            took = bench.seconds(lambda layer=layer: layer.run(attend))  # type: ignore[misc]
            layer.batch = replace(layer.batch, scratch={})
            torch_took = bench.seconds(lambda layer=layer: layer.run(torch_attention))  # type: ignore[misc]
            share = f"{moved / took / bench.bandwidth:.2f}"
            rate = f"{moved / took / 1e9:.0f}"
            table.add(
                name, _name(pages), f"{took * 1e6:.1f}", rate, share, f"{torch_took * 1e6:.1f}"
            )
    columns = ("chunk after cached", "ms", "TFLOP/s", "share of peak")
    table = bench.table("attention", "Attention of one layer, 0.6B shape, prefill", columns)
    for chunk, cached in ((2048, 0), (8192, 0), (512, 8192)):
        if bench.toy:
            chunk, cached = chunk // 128, cached // 128
        layer = Layer(make_batch([chunk + cached], chunk, bench), bench)
        took = bench.seconds(lambda layer=layer: layer.run(attend))  # type: ignore[misc]
        pairs = chunk * cached + chunk * (chunk + 1) / 2
        rate = 4 * pairs * layer.heads * layer.dim / took
        table.add(
            f"{chunk} after {cached}",
            f"{took * 1e3:.3f}",
            f"{rate / 1e12:.1f}",
            f"{rate / bench.flops:.2f}",
        )


def tiles(bench: Bench) -> None:
    """Decode attention over sizes of tiles: what `DECODE_KEYS` and the stages should be."""
    from rayfin.kernels.attention.triton_backend import Sizes, TileShape, TritonAttention

    class Tuned(TritonAttention):
        keys, stages = 32, 4

        def decode_shape(self, sizes: Sizes) -> TileShape:
            shape = super().decode_shape(sizes)
            return replace(shape, keys=self.keys, stages=self.stages)

    attend = Tuned(bench.device)
    columns = ("rows x context", "keys", "stages", "us", "share of bandwidth")
    table = bench.table("kernels", "Decode attention over tile sizes", columns)
    for name in (SPLIT, RAGGED):
        lengths = lengths_of(CONTEXTS[name], bench)
        for keys in (32, 64):
            for stages in (2, 3, 4):
                attend.keys, attend.stages = keys, stages
                layer = Layer(make_batch(lengths, 1, bench), bench)
                bench.expect(KERNEL, lambda layer=layer: layer.run(attend))  # type: ignore[misc]
                took = bench.seconds(lambda layer=layer: layer.run(attend))  # type: ignore[misc]
                moved = 2 * sum(lengths) * layer.kv_heads * layer.dim * bench.dtype.itemsize
                share = f"{moved / took / bench.bandwidth:.2f}"
                table.add(name, keys, stages, f"{took * 1e6:.1f}", share)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
