"""Checks the GPU path, then times it against the chip's limits.

    python benchmarks/gpu.py --call 1 --out gpu.jsonl
    python benchmarks/gpu.py --sections check,attention

``--call`` runs the sections of one call of docs/benchmarks/gpu.md, each of which takes less than
eight minutes. Prints tables for that page; ``--out`` keeps each row as soon as it is there. Floors
are bytes or operations over what an H200 was measured to reach (`--bandwidth`, `--flops` for
another chip). A section fails where it would time another path than the one it names; those after
it run all the same, and the exit code is 1. ``--toy`` runs tiny shapes on any device, to see that
the script works; its figures mean nothing.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_attention import attention, check_attention
from gpu_bench import Bench
from gpu_engine import actors, engine, fp8, graphs, idle, peer, prefill, prompts, release
from gpu_products import check_coded, check_products, kernels, matmul
from gpu_steps import check_steps, features, steps, steps_8b, steps_int4

from rayfin import __version__


def check(bench: Bench) -> None:
    """Raises if attention, products or whole steps are wrong."""
    check_attention(bench)
    check_products(bench)
    check_coded(bench)
    check_steps(bench)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "check": check,
    "attention": attention,
    "matmul": matmul,
    "engine": engine,
    "prefill": prefill,
    "prompts": prompts,
    "kernels": kernels,
    "steps": steps,
    "steps_8b": steps_8b,
    "steps_int4": steps_int4,
    "features": features,
    "fp8": fp8,
    "graphs": graphs,
    "idle": idle,
    "actors": actors,
    "peer": peer,
}
CALLS = {  # of the first session on a GPU, in order; 5 is compute-sanitizer's and ncu's
    1: ("check", "attention", "matmul"),
    2: ("engine", "fp8", "prefill"),
    3: ("kernels", "steps", "steps_8b", "steps_int4", "prompts"),
    4: ("check", "attention", "steps", "features", "graphs", "idle"),
    6: ("actors", "peer"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sections", default=",".join(SECTIONS), help=", ".join(SECTIONS))
    what.add_argument("--call", type=int, choices=CALLS, help="the sections of one call")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to, one a row")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes/s of the chip")
    parser.add_argument("--flops", type=float, default=790e12, help="16-bit operations/s")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, on any device")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.toy:
        parser.error("there is no GPU here; --toy shows that the script works")
    sections = CALLS[args.call] if args.call else args.sections.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"there are no sections {', '.join(sorted(unknown))}")
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    bench = Bench(device, dtype, args.bandwidth, args.flops, args.toy, args.out)
    print(f"{name}, torch {torch.__version__}, rayfin {__version__}", flush=True)
    bench.keep("device", {"name": name, "torch": torch.__version__, "rayfin": __version__})
    failed = [section for section in sections if not run(bench, section)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(bench: Bench, section: str) -> bool:
    """Whether a section ran to its end; keeps its seconds, or its error."""
    started = time.perf_counter()
    error = None
    try:
        SECTIONS[section](bench)
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"[:300]
    seconds = round(time.perf_counter() - started, 1)
    print(f"\n({section}: {seconds} s{', failed' if error else ''})", flush=True)
    bench.keep("seconds", {"of": section, "seconds": seconds, "error": error})
    release(bench)  # what a section that failed leaves behind
    return error is None


if __name__ == "__main__":
    main()
