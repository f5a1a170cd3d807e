"""The frame of a peer: commands in, timelines out. Standard library only.

A peer script defines how its engine is loaded and stepped and calls ``serve``. It runs under the
Python of its own environment, so nothing here may import Rayfin.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Engine(Protocol):
    """The engine of a peer. Every request runs to its full length, greedily."""

    version: str

    def add(self, index: int, prompt: list[int], output_tokens: int) -> None:
        """Adds a request."""
        ...

    def step(self) -> Iterable[tuple[int, int]]:
        """Runs for a while; returns (index, new tokens) of requests."""
        ...


class Static:
    """An engine that only runs whole batches: ``generate`` runs what has arrived."""

    def __init__(
        self, version: str, generate: Callable[[list[list[int]], list[int]], None]
    ) -> None:
        self.version = version
        self._generate = generate
        self._waiting: list[tuple[int, list[int], int]] = []

    def add(self, index: int, prompt: list[int], output_tokens: int) -> None:
        self._waiting.append((index, prompt, output_tokens))

    def step(self) -> Iterable[tuple[int, int]]:
        batch, self._waiting = self._waiting, []
        self._generate([prompt for _, prompt, _ in batch], [count for _, _, count in batch])
        return [(index, count) for index, _, count in batch]


def serve(load: Callable[[str, dict[str, Any]], Engine], workloads: tuple[str, ...] = ()) -> None:
    """Answers commands from stdin until it ends; see rayfin/deployments/bench/peers.py.

    ``load`` gets one of ``workloads``, the names of those beside plain tokens, as a setting.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    engine: Engine | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if engine is None:
                started = time.perf_counter()
                settings, workload = command["settings"], command.get("workload")
                if workload is not None:
                    if workload["name"] not in workloads:
                        raise ValueError(f"this peer does not run {workload['name']} requests")
                    settings["workload"] = workload
                engine = load(command["model"], settings)
                answer: dict[str, Any] = {
                    "ready": time.perf_counter() - started,
                    "version": engine.version,
                }
            else:
                answer = {"pieces": run(engine, command["jobs"])}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def run(engine: Engine, jobs: list[Any]) -> list[list[tuple[float, int]]]:
    """Adds each job when it is due; returns (seconds after the start, tokens) for each job."""
    pieces: list[list[tuple[float, int]]] = [[] for _ in jobs]
    missing = [output_tokens for _, _, output_tokens in jobs]
    due = sorted(range(len(jobs)), key=lambda index: jobs[index][0])
    start = time.perf_counter()
    running = 0
    while due or running:
        while due and jobs[due[0]][0] <= time.perf_counter() - start:
            index = due.pop(0)
            engine.add(index, jobs[index][1], jobs[index][2])
            running += 1
        if not running:
            time.sleep(max(0.0, jobs[due[0]][0] - (time.perf_counter() - start)))
            continue
        new = list(engine.step())
        now = time.perf_counter() - start
        for index, count in new:
            pieces[index].append((now, count))
            missing[index] -= count
            running -= missing[index] <= 0
    return pieces
