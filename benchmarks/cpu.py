"""The CPU path: its kernels beside torch and the machine's limits, and a model's whole step.

    python benchmarks/cpu.py kernels --threads 1
    python benchmarks/cpu.py step --shape 135m --threads 2

kernels: every figure is the best of many short runs, for the mean depends on other load of the
machine. A share of 1.00 is the measured read bandwidth or the FMA peak (four times that with 8-bit
weights), whichever an operation meets first.
step: a model with random weights in torch, with packed linear layers, and fused. Weights are those
of a bf16 checkpoint, computed in float32 by all three. Times are the best of some steps, and of
fewer in torch, which is slower.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from sections import run
from shapes import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.cpu.build_decoder import build_cpu_decoder
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.cpu.packed_layers import pack_linears
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.cpu.attention import CpuAttention
from rayfin.kernels.cpu.codes import pack_codes, pack_int4, pack_int8, stack_codes
from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Matrix
from rayfin.kernels.grouped import Grouped
from rayfin.kernels.shapes import PagedAttention, PagedBatch

PRODUCTS: dict[str, dict[str, tuple[int, int]]] = {  # name -> (outputs, inputs)
    "135m": {
        "qkv": (960, 576),
        "attention out": (576, 576),
        "gate, up": (3072, 576),
        "down": (576, 1536),
        "head": (49152, 576),
    },
    "0.6b": {
        "qkv": (4096, 1024),
        "attention out": (1024, 2048),
        "gate, up": (6144, 1024),
        "down": (1024, 3072),
        "head": (151936, 1024),
    },
}
PLAIN = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROUNDED = {"int8": pack_int8, "w4a8": pack_int4}
GROUP = 128
BYTES = {
    **{"int4": 0.5 + 4 / GROUP, "w4a8": 0.58, "fp8": 1.0, "int8": 1.06},
    **{name: float(dtype.itemsize) for name, dtype in PLAIN.items()},
}
STORED = list(BYTES)
"""int4 and fp8 multiply exact rows, w4a8 and int8 rows of 8 bits."""

HEADS = {"135m": (9, 3, 64), "0.6b": (16, 8, 128)}  # heads, kv_heads, dim
ROWS = (1, 2, 4, 8, 16, 64, 256, 1024)
CACHE_BYTES = 192 << 20  # weights rotate over more memory than a cache holds
PIECE = 12 << 20  # bytes read at once, briefly enough to run undisturbed now and then
PAGE_SIZE = 16


def best(run: Callable[[int], object], seconds: float) -> float:
    """Returns the shortest time of the runs within ``seconds``, after one warm-up."""
    run(0)
    shortest, until, i = float("inf"), time.perf_counter() + seconds, 1
    while i < 4 or time.perf_counter() < until:
        start = time.perf_counter()
        run(i)
        shortest = min(shortest, time.perf_counter() - start)
        i += 1
    return shortest


class Machine:
    """The machine's measured limits."""

    def __init__(self, kernels: CpuKernels) -> None:
        library, pool = kernels.library, kernels.pool
        pieces = [Matrix(library, PIECE >> 12, 1024, torch.float32, False) for _ in range(16)]
        out = torch.zeros(kernels.threads)
        operations = library.rayfin_multiply_all(pool, out.data_ptr())
        read = best(lambda i: library.rayfin_read_all(pool, pieces[i % 16].handle), 3.0)
        multiply = best(lambda _: library.rayfin_multiply_all(pool, out.data_ptr()), 3.0)
        self.bandwidth, self.flops = PIECE / read, operations / multiply

    def floor(self, bytes_read: float, operations: float) -> float:
        """Lower bound of the seconds."""
        return max(bytes_read / self.bandwidth, operations / self.flops)


def matmuls(
    kernels: CpuKernels, machine: Machine, shape: str, rows_of: list[int], seconds: float
) -> None:
    print(f"\n### matmul, {shape}\n")
    print("| weight | rows | stored | GFLOP/s | GB/s of weights | share | torch fp32, GFLOP/s |")
    print("|---|---|---|---|---|---|---|")
    for name, (outputs, inputs) in PRODUCTS[shape].items():
        weight = torch.randn(outputs, inputs)
        for rows in rows_of:
            if name == "head" and rows > 64:
                continue
            operations = 2 * rows * weight.numel()
            torch_time = time_torch(weight, rows, seconds)
            for stored in STORED:
                size = weight.numel() * BYTES[stored]
                peak = 4 if stored in ("int8", "w4a8") else 1  # times that of FMAs, with VNNI
                took = time_matmul(kernels, weight, stored, rows, name == "gate, up", seconds)
                print(
                    f"| {name} {outputs}x{inputs} | {rows} | {stored} "
                    f"| {operations / took / 1e9:.0f} | {size / took / 1e9:.1f} "
                    f"| {machine.floor(size, operations / peak) / took:.2f} "
                    f"| {operations / torch_time / 1e9:.0f} |",
                    flush=True,
                )


def time_torch(weight: torch.Tensor, rows: int, seconds: float) -> float:
    copies = [weight.clone() for _ in range(max(1, CACHE_BYTES // weight.nbytes))]
    x = torch.randn(rows, weight.shape[1])
    return best(lambda i: F.linear(x, copies[i % len(copies)]), seconds)


def time_matmul(
    kernels: CpuKernels,
    weight: torch.Tensor,
    stored: str,
    rows: int,
    paired: bool,
    seconds: float,
) -> float:
    """With its activation, if gate and up projection are in one weight."""
    copies = max(1, int(CACHE_BYTES / (weight.numel() * BYTES[stored])))
    packs = [pack(kernels, weight, stored, paired) for _ in range(copies)]
    x, out = torch.randn(rows, weight.shape[1]), torch.empty(rows, packs[0].columns)
    activation = Activation.SILU if paired else Activation.NONE

    def run(i: int) -> object:
        return kernels.matmul(x, packs[i % copies], activation=activation, out=out)

    return best(run, seconds)


def pack(kernels: CpuKernels, weight: torch.Tensor, stored: str, paired: bool) -> Matrix:
    if stored in PLAIN:
        return kernels.pack([weight], paired=paired, storage=PLAIN[stored])
    if stored in ROUNDED:
        return ROUNDED[stored](kernels, [weight], paired=paired)
    if stored == "fp8":
        values = weight.to(torch.float8_e4m3fn)
        grouped = Grouped(values, torch.ones(len(weight), 1), weight.shape[1], 8)
    else:
        codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8)
        scale = torch.ones(len(weight), -(-weight.shape[1] // GROUP))
        grouped = Grouped(codes, scale, GROUP, 4, torch.full(scale.shape, 8, dtype=torch.int32))
    coded = pack_codes(kernels, grouped)
    assert coded is not None
    return stack_codes(kernels, [coded], paired=paired)


def make_batch(rows: int, cached: int, chunk: int) -> PagedBatch:
    """Equal rows with pages in random order."""
    length = cached + chunk
    pages = -(-length // PAGE_SIZE)
    tables = torch.randperm(rows * pages).to(torch.int32).view(rows, pages)
    starts = np.arange(rows + 1, dtype=np.int32) * chunk
    lengths = np.full(rows, length, np.int32)
    positions = torch.arange(cached, length).repeat(rows)
    row = torch.arange(rows).repeat_interleave(chunk)
    return PagedBatch(
        query_start=torch.from_numpy(starts),
        kv_len=torch.from_numpy(lengths),
        page_tables=tables,
        slots=tables[row, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE,
        positions=positions,
        query_start_cpu=starts,
        kv_len_cpu=lengths,
        decoding=rows if chunk == 1 else 0,
        page_size=PAGE_SIZE,
    )


def attentions(kernels: CpuKernels, machine: Machine, shape: str, seconds: float) -> None:
    heads, kv_heads, dim = HEADS[shape]
    print(f"\n### attention, {shape}: {heads} heads, {kv_heads} key heads of {dim}\n")
    print("| step | pages | GFLOP/s | GB/s of pages | share | torch, times slower |")
    print("|---|---|---|---|---|---|")
    steps = [(rows, length - 1, 1) for rows in (1, 8, 32) for length in (128, 512, 2048)]
    steps += [(1, 0, 128), (1, 0, 512), (1, 0, 1024), (1, 512, 128)]
    for rows, cached, chunk in steps:
        length = cached + chunk
        operations = 4 * rows * chunk * (cached + (chunk + 1) / 2) * heads * dim
        for dtype in (torch.float32, torch.bfloat16):
            size = 2 * rows * length * kv_heads * dim * dtype.itemsize
            ours, other = (
                time_attention(kernel, shape, dtype, (rows, cached, chunk), seconds)
                for kernel in (CpuAttention(kernels), paged_attention)
            )
            step = f"{rows} rows of {length}" if chunk == 1 else f"{chunk} tokens after {cached}"
            print(
                f"| {step} | {str(dtype)[6:]} | {operations / ours / 1e9:.0f} "
                f"| {size / ours / 1e9:.1f} | {machine.floor(size, operations) / ours:.2f} "
                f"| {other / ours:.1f} |",
                flush=True,
            )


def time_attention(
    kernel: PagedAttention,
    shape: str,
    dtype: torch.dtype,
    step: tuple[int, int, int],
    seconds: float,
) -> float:
    heads, kv_heads, dim = HEADS[shape]
    rows, cached, chunk = step
    batch, query = make_batch(*step), torch.randn(rows * chunk, heads, dim)
    pages = rows * -(-(cached + chunk) // PAGE_SIZE)
    one = torch.randn(2, pages, PAGE_SIZE, kv_heads, dim).to(dtype)
    cache = [one.clone() for _ in range(max(1, min(64, CACHE_BYTES // one.nbytes)))]
    return best(
        lambda i: kernel(query, *cache[i % len(cache)], batch, scale=dim**-0.5),
        seconds,
    )


def norms(kernels: CpuKernels, machine: Machine, seconds: float) -> None:
    print("\n### norm with residual\n\n| rows | dim | us | torch, us |\n|---|---|---|---|")
    for rows, dim in ((1, 576), (16, 576), (16, 1024), (512, 1024)):
        x, weight, residual = torch.randn(rows, dim), torch.randn(dim), torch.randn(rows, dim)
        took = best(
            lambda _: kernels.rms_norm(x, weight, 1e-5, residual=residual, out=x),  # noqa: B023
            seconds,
        )
        other = best(
            lambda _: residual + F.rms_norm(x, (dim,), weight, 1e-5),  # noqa: B023
            seconds,
        )
        print(f"| {rows} | {dim} | {took * 1e6:.1f} | {other * 1e6:.1f} |")


def kernels() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", help="portable, avx2, avx512 or amx; default: the best")
    parser.add_argument("--shapes", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--only", choices=("matmul", "attention", "norm"))
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds per figure")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    kernels = CpuKernels(args.threads, args.isa)
    machine = Machine(kernels)
    print(
        f"{args.threads} threads, {args.isa or 'best'}: reads {machine.bandwidth / 1e9:.1f} GB/s, "
        f"multiplies {machine.flops / 1e9:.0f} GFLOP/s in fp32"
    )
    for shape in args.shapes:
        if args.only in (None, "matmul"):
            matmuls(kernels, machine, shape, args.rows, args.seconds)
        if args.only in (None, "attention"):
            attentions(kernels, machine, shape, args.seconds)
    if args.only in (None, "norm"):
        norms(kernels, machine, args.seconds)


STEPS = [(1, 127, 1), (4, 127, 1), (16, 127, 1), (32, 511, 1), (64, 127, 1), (1, 0, 512)]


def models(
    shape: str, threads: int, isa: str | None
) -> Iterator[tuple[str, PagedModel | CpuDecoder]]:
    """Times the three in order, for packing changes the model."""
    architecture, sizes = SHAPES[shape]
    config = AutoConfig.for_model(architecture, tie_word_embeddings=True, **sizes)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=ATTENTION
    )
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    torch.set_num_threads(threads)
    kernels = CpuKernels(threads, isa)
    yield "torch", PagedModel(model, paged_attention)
    fused = build_cpu_decoder(PagedModel(model, CpuAttention(kernels)), kernels)
    assert fused is not None
    yield "fused", fused
    packed = PagedModel(model, CpuAttention(kernels))
    pack_linears(packed, kernels)
    yield "packed", packed


def seconds_per_step(
    model: PagedModel | CpuDecoder, step: tuple[int, int, int], runs: int
) -> float:
    rows, cached, chunk = step
    pages = rows * -(-(cached + chunk) // PAGE_SIZE)
    cache = KVTensors(model.layouts, pages, PAGE_SIZE, model.dtype, torch.device("cpu"))
    model.bind(cache)
    tokens = torch.arange(rows * chunk) % 1000
    sampled = torch.arange(rows) * chunk + chunk - 1
    shortest = float("inf")
    for _ in range(runs):
        batch = make_batch(rows, cached, chunk)
        start = time.perf_counter()
        model.forward(StepInputs(tokens, batch, sampled))
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def step() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", help="portable, avx2, avx512 or amx; default: the best")
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    print("| model | rows | context | tokens per row | ms | tokens/s |\n|---|---|---|---|---|---|")
    for name, model in models(args.shape, args.threads, args.isa):
        for step in STEPS:
            rows, cached, chunk = step
            took = seconds_per_step(model, step, args.runs if name == "fused" else 3)
            print(
                f"| {name} | {rows} | {cached + chunk} | {chunk} | {took * 1e3:.1f} "
                f"| {rows * chunk / took:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    run(__doc__, kernels, step)
