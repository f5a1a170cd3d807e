"""What a step of an inline `LLM` costs beside the model: processor time of its one thread.

python benchmarks/offline_host.py [--rows 1,32,256]

The runner answers at once. "in parts" reads each token as it comes, as with stop strings; "whole"
reads an output at its end. The least of several runs is printed, since other processes only add.
"""

import argparse
import time
from typing import Any

import numpy as np

from rayfin import LLM, SamplingParams
from rayfin.actors.messages import SchedulerInfo, StepResult

TOKENS, TOKEN = 100, 40
ROUNDS = 5


class Answered:
    """A step whose rows all sample the same token."""

    def __init__(self, info: SchedulerInfo) -> None:
        self._info = info

    def result(self) -> StepResult:
        info = self._info
        tokens = np.where(info.last_pos >= 0, TOKEN, -1).astype(np.int32)[:, None]
        return StepResult(info.epoch, info.step, tokens, seconds=1e-3)


class InstantExecutor:
    """Takes the place of an inline engine's executor, and counts steps."""

    epoch = 0

    def __init__(self) -> None:
        self.steps = 0

    def submit(self, info: SchedulerInfo) -> Answered:
        self.steps += 1
        return Answered(info)


def milliseconds(llm: LLM, rows: int, **settings: Any) -> float:
    """Of a step, on average over a run of so many requests."""
    engine: Any = llm._engine
    executor = engine._engine._pipeline._executor
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, **settings)
    prompts = [[5 + row % 50, 6, 7] for row in range(rows)]
    least = float("inf")
    for _ in range(ROUNDS):
        before, started = executor.steps, time.thread_time()
        llm.generate(prompts, params, use_tqdm=False)
        least = min(least, (time.thread_time() - started) / (executor.steps - before))
    return least * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1,32,256", help="numbers of requests")
    sizes = [int(rows) for rows in parser.parse_args().rows.split(",")]
    pages = {"max_decoding_batch": max(sizes), "kv_cache_memory": 1 << 28}
    llm = LLM(model="demo", max_lease=1, **pages)  # a stub answers with one token
    engine: Any = llm._engine
    engine._engine._pipeline._executor = InstantExecutor()
    print("| rows | in parts, ms a step | whole | whole, without text |\n|---|---|---|---|")
    for rows in sizes:
        values = [
            milliseconds(llm, rows, stop=["never written"]),
            milliseconds(llm, rows),
            milliseconds(llm, rows, detokenize=False),
        ]
        print(f"| {rows} | {' | '.join(f'{value:.2f}' for value in values)} |")


if __name__ == "__main__":
    main()
