"""Times a step of a model with random weights: in torch, with packed linear layers, and fused.

    python benchmarks/cpu_step.py --shape 135m --threads 2

Weights are those of a bf16 checkpoint, computed in float32 by all three. Times are the best of some
steps, and of fewer in torch, which is slower.
"""

import argparse
import time
from collections.abc import Iterator

import torch
from cpu_kernels import PAGE_SIZE, make_batch
from shapes import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

from rayfin.actors.runner.cpu.build_decoder import build_cpu_decoder
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.cpu.packed_layers import pack_linears
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.runner.step.batch import StepInputs
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.cpu.attention import CpuAttention
from rayfin.kernels.cpu.kernels import CpuKernels

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
    main()
