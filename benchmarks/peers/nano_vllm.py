"""nano-vllm on the workload of its own ``bench.py``, with FlashAttention 3 in place of 2.

    PYTHONPATH=src:NANO_VLLM python benchmarks/peers/nano_vllm.py --out nano.jsonl

Not a peer of `engines.py`: it needs a GPU, nano-vllm's sources on the path, and
``flash_attn_interface``. Weights are random, as those of `gpu.py`; there is no tokenizer.
"""

import argparse
import json
import sys
import tempfile
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_bench import Bench
from gpu_engine import Workloads, make_jobs, save_config

FIRST = [(32, 32)] * 8
SLOWEST = 500.0
"""Tokens per second of 8 rows, below which something is wrong and nothing else is timed."""


def flash_attention_2() -> ModuleType:
    """A module ``flash_attn`` of the two functions that nano-vllm calls."""
    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)

    def varlen(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_table: Any = None, **given: Any
    ) -> torch.Tensor:
        import flash_attn_interface

        if block_table is None:
            out = flash_attn_interface.flash_attn_varlen_func(q, k, v, **given)
        else:
            starts = given.pop("cu_seqlens_k")
            del given["max_seqlen_k"]
            out = flash_attn_interface.flash_attn_with_kvcache(
                q, k, v, page_table=block_table, cache_seqlens=starts[1:] - starts[:-1], **given
            )
        return first_of(out)

    def with_kvcache(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_table: Any, **given: Any
    ) -> torch.Tensor:
        import flash_attn_interface

        return first_of(
            flash_attn_interface.flash_attn_with_kvcache(q, k, v, page_table=block_table, **given)
        )

    def first_of(out: Any) -> torch.Tensor:
        given: torch.Tensor = out[0] if isinstance(out, tuple | list) else out
        return given

    module.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = with_kvcache  # type: ignore[attr-defined]
    return module


class NoTokenizer:
    """Stands in for a tokenizer, which takes no part in the workload."""

    eos_token_id = -1

    def encode(self, text: str) -> list[int]:
        return [1]

    def decode(self, tokens: list[int]) -> str:
        return ""


def draw_weights(model: torch.nn.Module, path: str) -> None:
    """Random matrices and norms of one, in place of a checkpoint's."""
    for name, weight in model.named_parameters():
        weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(std=0.02)


def make_engine(bench: Bench, folder: Path) -> Any:
    """nano-vllm's ``LLM`` of the 0.6B shape, as its ``bench.py`` makes it."""
    sys.modules["flash_attn"] = flash_attention_2()
    from nanovllm import LLM
    from nanovllm.engine import llm_engine, model_runner

    llm_engine.AutoTokenizer = type("Stub", (), {"from_pretrained": lambda *_, **__: NoTokenizer()})
    model_runner.load_model = draw_weights
    config = save_config(bench, folder)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    return LLM(str(folder), enforce_eager=False, max_model_len=4096)


def timed(llm: Any, shapes: list[tuple[int, int]], seed: int) -> float:
    """Seconds for requests of (prompt, output) tokens, all at once."""
    from nanovllm import SamplingParams

    jobs = make_jobs(shapes, seed)
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=job.output_tokens)
        for job in jobs
    ]
    started = time.perf_counter()
    llm.generate([list(job.prompt) for job in jobs], params, use_tqdm=False)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append JSON lines to, one a row")
    parser.add_argument("--toy", action="store_true", help="import what is used, and stop")
    args = parser.parse_args()
    device = torch.device("cpu" if args.toy else "cuda")
    bench = Bench(device, torch.bfloat16, 1.0, 1.0, args.toy, args.out)
    if args.toy:
        sys.modules["flash_attn"] = flash_attention_2()
        from nanovllm.engine import llm_engine

        print(f"imported {llm_engine.__file__}")
        return

    def keep(**row: object) -> None:
        print(json.dumps(row), flush=True)
        bench.keep("nano-vllm", row)

    work = Workloads.of(bench)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        llm = make_engine(bench, Path(folder))
        keep(start_seconds=round(time.perf_counter() - started, 1))
        timed(llm, FIRST, 0)
        rate = sum(out for _, out in FIRST) / timed(llm, FIRST, 1)
        keep(first_tokens_per_second=round(rate))
        if rate < SLOWEST:
            raise SystemExit("nano-vllm is slower than it can be: its figures would mean nothing")
        prompt, output = work.single
        one = timed(llm, [work.single], 0) - timed(llm, [(prompt, 1)], 0)
        keep(batch_1_ms=round(one / (output - 1) * 1e3, 3))
        timed(llm, work.nano[:64], 3)  # compiles for prompts of many sizes
        for seed in (1, 2):
            took = timed(llm, work.nano, seed)
            keep(seed=seed, nano_tokens_per_second=round(sum(out for _, out in work.nano) / took))


if __name__ == "__main__":
    main()
