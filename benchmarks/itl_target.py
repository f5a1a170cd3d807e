"""A stream beside long prompts, with and without ``--itl-target-ms``: its gaps, and the chunks.

    python benchmarks/itl_target.py --targets 0 100 50      # 0: none

Random weights; the engine runs in this process.
"""

import argparse
import tempfile
import time
from dataclasses import replace

import numpy as np
from shapes import SHAPES
from speculation import save

from rayfin.actors.config import EngineArgs, resolve
from rayfin.actors.messages import EngineRequest, Sampling, StopRules
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.scheduler.engine import Engine

STREAM = 0
BETWEEN = 8
"""Tokens of the stream between two prompts."""


def request(key: int, tokens: int, output: int, vocabulary: int) -> EngineRequest:
    prompt = np.random.default_rng(key).integers(0, vocabulary, tokens).astype(np.int32)
    rules = StopRules(output, frozenset())
    return EngineRequest(str(key), prompt, Sampling(seed=key), rules, key=key)


def run(engine: Engine, vocabulary: int, prompts: int, length: int) -> dict[str, float]:
    """Figures of a stream that sees so many prompts of ``length`` tokens come."""
    engine.add(request(STREAM, 32, 4000, vocabulary))
    gaps, chunks, waits = list[float](), list[int](), list[float]()
    came, last, sent, since = 0.0, 0.0, 0, 0
    while sent <= prompts:
        messages = engine.step()
        now, step = time.perf_counter(), engine.lifecycle.state
        tokens = [key for deltas in messages.values() for key in deltas.keys.tolist()]
        if STREAM in tokens:
            if came and last:
                gaps.append(now - last)
                ran = engine._last_step
                chunks.append(0 if ran is None else ran.num_prefill_tokens)
            last, since = now, since + 1
        if sent and sent in tokens:
            waits.append(now - came)
            came = 0.0
        if not came and not step.running.prefilling and since >= BETWEEN:
            sent, since, came = sent + 1, 0, now
            if sent <= prompts:
                engine.add(request(sent, length, 1, vocabulary))
    engine.abort("", STREAM)
    return {
        "p50": 1000 * float(np.median(gaps)),
        "p99": 1000 * float(np.quantile(gaps, 0.99)),
        "chunk": float(np.median([count for count in chunks if count])),
        "first": 1000 * float(np.median(waits)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--targets", type=float, nargs="+", default=[0, 100, 50])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=1000)
    options = parser.parse_args()
    vocabulary = SHAPES[options.shape][1]["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        save(folder, options.shape, vocabulary)
        args = EngineArgs(
            model=folder,
            load_format="dummy",
            dtype="float32",
            max_model_len=4096,
            kv_cache_memory=2**30,
            prefix_caching=False,
        )
        runner = ModelRunner(args)
        facts = runner.profile()
    print("| target | tokens of a chunk | gap, median | gap, p99 | first token of a prompt |")
    print("|---|---|---|---|---|", flush=True)
    for target in options.targets:
        config = resolve(replace(args, itl_target_ms=target or None), *facts)
        engine = Engine(config, InlineExecutor(runner, config))
        found = run(engine, vocabulary, options.prompts, options.length)
        name = f"{target:g} ms" if target else "none"
        print(
            f"| {name} | {found['chunk']:.0f} | {found['p50']:.0f} ms | {found['p99']:.0f} ms "
            f"| {found['first']:.0f} ms |",
            flush=True,
        )


if __name__ == "__main__":
    main()
