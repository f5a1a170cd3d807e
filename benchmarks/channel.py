"""Measures the cost of sending a step to a runner actor and back, by value or by ``ray.put``.

python benchmarks/channel.py [--calls 300]
"""

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from rayfin.actors.messages import SchedulerInfo, StepResult

ROWS = (1, 32, 256)
ROUNDS = 5  # the two ways alternate, so that other load hits both


@ray.remote(max_restarts=0, num_cpus=1)
class Echo:
    """A runner without a model."""

    def execute(self, info: SchedulerInfo) -> StepResult:
        return StepResult(info.epoch, info.step, np.zeros((len(info.ids), 1), np.int32))


def decode_step(rows: int) -> SchedulerInfo:
    """A step of ``rows`` decoding requests."""
    zeros, ones = np.zeros(rows, np.int32), np.ones(rows, np.int32)
    return SchedulerInfo(
        epoch=0,
        step=0,
        ids=np.arange(rows, dtype=np.int32),
        chunk_idx=np.arange(rows, dtype=np.int32),
        chunk_len=ones,
        merge_prompt=-ones,
        kv_len=ones * 500,
        kv_page_len=ones * 32,
        last_pos=zeros,
        is_decoding=np.ones(rows, np.bool_),
        decoding_batch=rows,
        prefill_batch=0,
        new_pages=np.zeros(rows // 16, np.int32),
        new_pages_len=zeros,
    )


def seconds_per_call(send: Callable[[], Any], calls: int, depth: int) -> float:
    """Mean seconds of a call with ``depth`` of them in flight."""
    in_flight: deque[Any] = deque()
    started = time.perf_counter()
    for _ in range(calls):
        in_flight.append(send())
        if len(in_flight) == depth:
            ray.get(in_flight.popleft())
    ray.get(list(in_flight))
    return (time.perf_counter() - started) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    calls = parser.parse_args().calls
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=1)
    echo: Any = Echo.remote()
    ways: dict[str, Callable[[SchedulerInfo], Any]] = {
        "by value": lambda info: echo.execute.remote(info),
        "ray.put": lambda info: echo.execute.remote(ray.put(info)),
    }
    print("| rows | in flight | by value, ms | ray.put, ms | ratio |")
    print("|---|---|---|---|---|")
    for rows in ROWS:
        info = decode_step(rows)
        for depth in (1, 2):
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS + 1):
                for name, way in ways.items():
                    times[name].append(
                        seconds_per_call(lambda way=way, info=info: way(info), calls, depth)  # type: ignore[misc]
                    )
            value, put = (1e3 * statistics.median(times[name][1:]) for name in ways)
            print(f"| {rows} | {depth} | {value:.2f} | {put:.2f} | {put / value:.1f} |")
    ray.shutdown()


if __name__ == "__main__":
    main()
