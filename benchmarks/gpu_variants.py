"""Forms of kernels side by side: what a device decides before one of them becomes the only one.

    python benchmarks/gpu_variants.py --out variants.jsonl
    python benchmarks/gpu_variants.py --only attention8,fp8
    ncu -k regex:attend_tiles python benchmarks/gpu_variants.py --once --only attention8,fp8

A row names its case, the form, microseconds of the device, and how far its result is from the plain
form's. Rows are kept as soon as they are there; a case that fails is a row that says so. ``--only``
takes cases that have all of these words. ``--toy`` runs tiny shapes on any device.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported

from gpu_attention import PAGE_SIZE, Layer, lengths_of, make_batch
from gpu_bench import Bench, Table
from gpu_engine import running, shape_of
from gpu_floors import Floors
from gpu_paths import runner_of
from gpu_steps import CONTEXT, load

from rayfin.kernels.attention.triton_backend import (
    CAST,
    OCTETS,
    PAIRS,
    PTX,
    Forms,
    Sizes,
    TileShape,
    TritonAttention,
)
from rayfin.kernels.grouped import Grouped
from rayfin.kernels.triton.experts import Experts, map_assignments, run_experts
from rayfin.kernels.triton.layers import gate
from rayfin.kernels.triton.products import FEW_ROWS, MMA_ROWS
from rayfin.kernels.triton.products import product as few_product
from rayfin.kernels.triton.quantized import COLUMNS, EIGHT, pack_weight, product

FP8 = torch.float8_e4m3fn
FORMS = {
    "bf16": {
        "now": Forms(),
        "two loops, per key": Forms(two_loops=True, per_key=True),
        "per key": Forms(per_key=True),
        "two loops": Forms(two_loops=True),
        "by page": Forms(by_page=True),
        "by page, two loops, per key": Forms(two_loops=True, per_key=True, by_page=True),
    },
    "fp8": {
        "now": Forms(),
        "PTX, two loops, per key": Forms(two_loops=True, per_key=True, fp8=PTX),
        "PTX, per key": Forms(per_key=True, fp8=PTX),
        "PTX": Forms(fp8=PTX),
        "PTX, by page, two loops, per key": Forms(
            two_loops=True, per_key=True, fp8=PTX, by_page=True
        ),
        "pairs, two loops, per key": Forms(two_loops=True, per_key=True, fp8=PAIRS),
    },
}
DECODES = {"attention8": "ragged 8", "attention80": [1024] * 80, "attention256": "ragged 256"}
FEW = {"qkv": (4096, 1024), "o": (1024, 2048), "up": (6144, 1024), "down": (1024, 3072)}
CODED = {"gate_up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096)}
COLUMN_NAMES = ("case", "form", "us", "share of bandwidth or peak", "largest difference")
Case = Callable[[], None]


class Cases:
    """What the cases share: the device, the table, and whether each runs once without a clock."""

    def __init__(self, bench: Bench, table: Table, once: bool) -> None:
        self.bench, self.once, self._table = bench, once, table

    def row(
        self,
        case: str,
        form: str,
        run: Callable[[], torch.Tensor],
        wanted: torch.Tensor | None,
        floor: float,
    ) -> torch.Tensor | None:
        """Adds a row; returns the result, or None where the form fails.

        Args:
            wanted: the result of another form.
            floor: seconds that the chip's limits leave.
        """
        try:
            given = run().float()
            apart = "-" if wanted is None else f"{float((given - wanted).abs().max()):.1e}"
            if not self.once:
                took = self.bench.seconds(run)
                self._table.add(case, form, f"{took * 1e6:.1f}", f"{floor / took:.2f}", apart)
            return given
        except Exception as error:
            what = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._table.add(case, form, "failed", "-", what[:160])
            return None


def decodes(cases: Cases, name: str, dtype: str) -> None:
    """One layer of the 0.6B shape, in each form, then FlashAttention 3 where it is there."""
    bench = cases.bench
    lengths = lengths_of(DECODES[name], bench)
    batch = make_batch(lengths, 1, bench)
    layer = Layer(batch, bench, FP8 if dtype == "fp8" else None)
    floor = 2 * sum(lengths) * layer.kv_heads * layer.dim * layer.keys.dtype.itemsize
    wanted = attend_in_forms(cases, f"{name} {dtype}", layer, FORMS[dtype], floor / bench.bandwidth)
    if dtype == "bf16" and wanted is not None:
        run = partial(flash_attention, layer, 0)
        cases.row(f"{name} {dtype}", "FA3", run, wanted, floor / bench.bandwidth)


def attend_in_forms(
    cases: Cases, case: str, layer: Layer, forms: dict[str, Forms], floor: float, rows: int = 0
) -> torch.Tensor | None:
    """The plain form's result."""

    class Tiled(TritonAttention):
        def prefill_shape(self, sizes: Sizes) -> TileShape:
            shape = super().prefill_shape(sizes)
            if not rows:
                return shape
            parts = (rows, rows // sizes.group, shape.keys, shape.programs, 4, shape.stages, 1)
            return TileShape(*parts)

    wanted = None
    for form, how in forms.items():
        attention = Tiled(cases.bench.device)
        words = OCTETS if how.fp8 == PTX and not cases.bench.on_gpu else how.fp8
        attention.forms = replace(how, fp8=words)
        layer.batch.scratch.clear()
        given = cases.row(case, form, partial(layer.run, attention), wanted, floor)
        wanted = given if wanted is None else wanted
    layer.batch.scratch.clear()
    return wanted


def flash_attention(layer: Layer, splits: int) -> torch.Tensor:
    """The same by FlashAttention 3; ``splits``: 0 for as many as it likes."""
    from flash_attn_interface import flash_attn_with_kvcache

    batch = layer.batch
    out = flash_attn_with_kvcache(
        layer.query,
        layer.keys,
        layer.values,
        page_table=batch.page_tables,
        cache_seqlens=batch.kv_len,
        cu_seqlens_q=batch.query_start,
        max_seqlen_q=int((batch.query_start_cpu[1:] - batch.query_start_cpu[:-1]).max()),
        softmax_scale=layer.dim**-0.5,
        causal=True,
        num_splits=splits,
    )
    given: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return given


def prompts(cases: Cases, name: str, dtype: str) -> None:
    """A prompt of 8192 tokens, of the 0.6B shape's heads, in each form and two heights of tiles."""
    bench = cases.bench
    tokens = 64 if bench.toy else 8192
    layer = Layer(make_batch([tokens], tokens, bench), bench, FP8 if dtype == "fp8" else None)
    floor = 4 * tokens * (tokens + 1) / 2 * layer.heads * layer.dim / bench.flops
    forms = {"now": Forms(), "two loops": Forms(two_loops=True)}
    forms["by page, two loops"] = Forms(two_loops=True, by_page=True)
    if dtype == "fp8":
        forms["PTX, two loops"] = Forms(two_loops=True, fp8=PTX)
    wanted = attend_in_forms(cases, f"{name} {dtype}", layer, forms, floor)
    if dtype == "bf16":
        two = {"two loops": forms["two loops"]}
        attend_in_forms(cases, f"{name} {dtype}, 64 rows", layer, two, floor, rows=64)
        cases.row(f"{name} {dtype}", "FA3", partial(flash_attention, layer, 1), wanted, floor)


def coded(cases: Cases, name: str, kind: str) -> None:
    """Products with codes of the 8B shape: tiles of 8 rows and of 16, in parts."""
    bench = cases.bench
    outputs, inputs = (size // 32 for size in CODED[name]) if bench.toy else CODED[name]
    weight = weight_of(outputs, inputs, kind, bench)
    codes = pack_weight(weight, bench.dtype)
    assert codes is not None
    plain = weight.dense().to(bench.dtype)
    wide = COLUMNS[0][outputs > 8192]
    for rows in (1, 8):
        x = torch.randn(rows, inputs, dtype=bench.dtype, device=bench.device)
        case, floor = f"{name} {kind} rows{rows}", codes.bytes / bench.bandwidth
        wanted = cases.row(case, "torch's of 16 bits", partial(F.linear, x, plain), None, floor)
        cases.row(case, "now", partial(product, x, codes, None), wanted, floor)
        few = {"gate_up": (1, 2, 3), "down": (8, 9, 12), "qkv": (5, 6, 8)}[name]
        for label, shape in (("16 rows", wide), ("8 rows", EIGHT)):
            for split in few:
                run = partial(product, x, codes, None, shape=shape, split=split)
                cases.row(case, f"{label}, {split} parts", run, wanted, floor)


def weight_of(outputs: int, inputs: int, kind: str, bench: Bench) -> Grouped:
    """A 4-bit weight with groups of 128 and zero points, or one of e4m3 in blocks of 128."""
    groups = -(-inputs // 128)
    scale = (0.01 * (1 + torch.rand(outputs, groups, device=bench.device))).half().float()
    if kind == "int4":
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=bench.device)
        zero = torch.randint(0, 16, (outputs, groups), dtype=torch.int32, device=bench.device)
        return Grouped(codes, scale, 128, 4, zero)
    floats = torch.randn(outputs, inputs, device=bench.device).mul_(60).clamp_(-448, 448)
    return Grouped(floats.to(FP8), scale / 60, 128, 8)


def scaled(cases: Cases, name: str, rows: int) -> None:
    """torch's products of two fp8 matrices, with scales of blocks, of rows, and one for all.

    Which strides of scales a device takes is not documented: a row for each.
    """
    bench = cases.bench
    outputs, inputs = (256, 256) if bench.toy else CODED[name]
    kinds = F.ScalingType
    floats = (
        torch.randn(rows, inputs, device=bench.device),
        torch.randn(outputs, inputs, device=bench.device),
    )
    x, weight = (each.to(FP8) for each in floats)
    wanted_of = [each.to(bench.dtype) for each in (x.to(bench.dtype), weight.to(bench.dtype))]
    case = f"scaled {name} rows{rows}"
    floor = max(rows * outputs * inputs / bench.flops, weight.nbytes / bench.bandwidth)
    run = partial(F.linear, *wanted_of)
    wanted = cases.row(case, "torch's of 16 bits", run, None, floor)

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=bench.device)

    blocks, four = -(-inputs // 128), -(-inputs // 512) * 4
    of_rows = ones(blocks, rows).T  # [T, K / 128], of successive rows
    recipes: dict[str, tuple[Any, torch.Tensor, Any, torch.Tensor]] = {
        "one scale": (kinds.TensorWise, ones(), kinds.TensorWise, ones()),
        "scales of rows": (kinds.RowWise, ones(rows, 1), kinds.RowWise, ones(1, outputs)),
    }
    of_blocks = {
        "[N, K]": ones(-(-outputs // 128), blocks),
        "[K, N]": ones(-(-outputs // 128), blocks).T,
        "[K in fours, N]": ones(-(-outputs // 128), four).T,
        "[N, K in fours]": ones(-(-outputs // 128), four),
    }
    for strides, scales in of_blocks.items():
        blocked = (kinds.BlockWise1x128, of_rows, kinds.BlockWise128x128, scales)
        recipes[f"scales of blocks {strides}"] = blocked
    for label, (recipe_x, scale_x, recipe_weight, scale_weight) in recipes.items():
        options: dict[str, Any] = {"output_dtype": torch.bfloat16}
        arguments = (x, weight.T, scale_x, recipe_x, scale_weight, recipe_weight)
        run = partial(F.scaled_mm, *arguments, **options)
        given = cases.row(case, label, run, wanted, floor)
        if given is not None and "blocks" in label:
            break


def few(cases: Cases, name: str, rows: int) -> None:
    """Products of few rows of the 0.6B shape: torch's, and ours on tensor cores."""
    bench = cases.bench
    outputs, inputs = (size // 32 for size in FEW[name]) if bench.toy else FEW[name]
    weight = torch.randn(outputs, inputs, dtype=bench.dtype, device=bench.device) / inputs**0.5
    x = torch.randn(rows, inputs, dtype=bench.dtype, device=bench.device)
    case, floor = f"few {name} rows{rows}", weight.nbytes / bench.bandwidth
    wanted = cases.row(case, "torch's", partial(F.linear, x, weight), None, floor)
    cases.row(case, "sixteen rows", partial(few_product, x, weight, None), wanted, floor)


def experts(cases: Cases, tokens: int) -> None:
    """128 plain experts of Qwen3-30B-A3B, 8 a token: our tiles, and torch's grouped product."""
    bench = cases.bench
    count, hidden, inner, choices = (8, 32, 16, 2) if bench.toy else (128, 2048, 768, 8)
    tokens = tokens // 256 if bench.toy else tokens

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=bench.device).mul_(shape[-1] ** -0.5).to(bench.dtype)

    mixture = Experts(drawn(count, 2, inner, hidden), drawn(count, hidden, inner), "silu")
    x, chosen = drawn(tokens, hidden), torch.rand(tokens, count, device=bench.device)
    weights, chosen = chosen.softmax(1).to(bench.dtype).topk(choices)
    case, floor = f"experts tokens{tokens}", 6 * tokens * choices * hidden * inner / bench.flops
    run = partial(run_experts, x, mixture, chosen, weights)
    wanted = cases.row(case, "now", run, None, floor)
    cases.row(case, "grouped_mm", partial(grouped, x, mixture, chosen, weights), wanted, floor)


def grouped(
    x: torch.Tensor, experts: Experts, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """`run_experts` of plain experts by torch's grouped product, whose offsets are on the device.

    It takes numbers of 16 bits, and strides of multiples of 16 bytes.
    """
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    assert isinstance(experts.activation, str)
    order = map_assignments(chosen, None, len(down), 128)[0].long()
    numbers = torch.arange(len(down), device=x.device)
    ends = torch.searchsorted(chosen.flatten()[order], numbers, right=True).int()
    rows = x[order // chosen.shape[1]]
    both = F.grouped_mm(rows, gate_up.flatten(1, 2).mT, offs=ends)
    parts = F.grouped_mm(gate(both, experts.activation), down.mT, offs=ends)
    parts = torch.empty_like(parts).index_copy_(0, order, parts * weights.flatten()[order, None])
    return parts.view(*chosen.shape, -1).sum(1)


def steps(cases: Cases) -> None:
    """Decode steps of the 0.6B shape: as they are, started early, with products of 16 rows; on a
    GPU only."""
    bench = cases.bench
    if not bench.on_gpu:
        return
    with running(bench, "0.6b") as llm:
        runner = runner_of(llm)
        graphs = runner._graphs
        assert graphs is not None and runner._loaded.gpu_model.pdl
        floors = Floors.of(shape_of(bench, "0.6b")[1], bench.bandwidth, bench.flops)
        for rows in (8, 16, 32, 64, 256):
            wanted, floor = None, floors.decode([CONTEXT] * rows)
            for form, early, few_rows in (
                ("now", 0, FEW_ROWS),
                ("early", sys.maxsize, FEW_ROWS),
                ("sixteen rows", 0, MMA_ROWS),
                ("sixteen rows, early", sys.maxsize, MMA_ROWS),
            ):
                model = runner._loaded.gpu_model
                model.early_rows, model.few_rows = early, few_rows
                graphs._replays.clear()
                replay = load(graphs, rows, runner)

                def run(replay: Case = replay, rows: int = rows) -> torch.Tensor:
                    replay()
                    return graphs._state.sampled[:rows]

                given = cases.row(f"steps rows{rows}", form, run, wanted, floor)
                wanted = given if wanted is None else wanted
        graphs.use(runner._slots)


def all_cases(cases: Cases) -> Iterator[tuple[str, Case]]:
    """Words of each case, and what runs it; what decides most comes first."""
    for name, dtype in (
        ("attention256", "fp8"),
        ("attention256", "bf16"),
        ("attention8", "bf16"),
        ("attention8", "fp8"),
        ("attention80", "bf16"),
        ("attention80", "fp8"),
    ):
        yield f"{name} {dtype}", partial(decodes, cases, name, dtype)
    yield "gate_up int4", partial(coded, cases, "gate_up", "int4")
    yield "prefill bf16", partial(prompts, cases, "prefill", "bf16")
    for name in FEW:
        for rows in (5, 8, 16):
            yield f"few {name}", partial(few, cases, name, rows)
    yield "down int4", partial(coded, cases, "down", "int4")
    yield "prefill fp8", partial(prompts, cases, "prefill", "fp8")
    yield "scaled down", partial(scaled, cases, "down", 2048)
    yield "scaled down", partial(scaled, cases, "down", 128)
    yield "gate_up fp8_weights", partial(coded, cases, "gate_up", "e4m3")
    yield "qkv int4", partial(coded, cases, "qkv", "int4")
    yield "steps", partial(steps, cases)
    for tokens in (1024, 2048, 8192):
        yield "experts", partial(experts, cases, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="words of the cases to run")
    parser.add_argument("--once", action="store_true", help="run each form once, for a profiler")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to, one a row")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes/s of the chip")
    parser.add_argument("--flops", type=float, default=790e12, help="16-bit operations/s")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, on any device")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.toy:
        parser.error("there is no GPU here; --toy shows that the script works")
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float16
    bench = Bench(device, dtype, args.bandwidth, args.flops, args.toy, args.out)
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    note = f"{name}, torch {torch.__version__}, pages of {PAGE_SIZE}, plain form {CAST}"
    cases = Cases(bench, bench.table("variants", "Forms of kernels", COLUMN_NAMES, note), args.once)
    words = set(filter(None, args.only.split(",")))
    for named, run in all_cases(cases):
        if not words <= set(named.split()):
            continue
        try:
            with torch.inference_mode():
                run()
        except Exception as error:
            bench.keep(
                "variants", {"case": named, "error": f"{type(error).__name__}: {error}"[:300]}
            )
            print(f"{named}: {error}", flush=True)


if __name__ == "__main__":
    main()
