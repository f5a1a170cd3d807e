"""Measures the cost of fault tolerance without faults: the same steps with and without it.

    python benchmarks/recovery.py [--rows 1,16,64] [--rounds 15]

*With*: the step goes through RunnerGroup and ModelRunnerActor as in production (failpoints,
timeouts, leases, epochs) without Ray's call in between, and the engine watches suspects, keeps
token logs and looks for silent clients. *Without*: the engine calls the runner directly. Figures
are CPU microseconds of the process, which other load hardly changes; rounds alternate.

A step is one call to the runner. The share is of a call of the demo model on the CPU, the smallest
model, with the default number of decode steps. --check-pages, off by default, is measured on that
model too.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rayfin.actors.config import BatchLimits, EngineArgs, EngineConfig, resolve
from rayfin.actors.messages import (
    NO_TOKEN,
    EngineRequest,
    Int64Array,
    Receipt,
    Sampling,
    SchedulerInfo,
    StepResult,
    StopRules,
)
from rayfin.actors.runner.actor import ModelRunnerActor
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.scheduler import runner_group as group
from rayfin.actors.scheduler.core.step_builder import Chunk
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.subscriptions import Subscriptions
from rayfin.actors.timing import CLIENT_LEASE_SECONDS
from rayfin.deployments.serve.preflight import DEMO_FOLDER

CLIENT = "client"
MODEL_LEN = 2048
PROMPT_TOKENS = 100
WARM_UP, STEPS, MODEL_STEPS = 40, 400, 60
FOR_EVER = 1e9  # seconds, for leases


class StubRunner:
    """Always returns the same token, at no cost."""

    def start(self, config: EngineConfig, epoch: int) -> None: ...

    def execute(self, info: SchedulerInfo) -> StepResult:
        tokens = np.where(info.last_pos >= 0, 7, NO_TOKEN).astype(np.int32)
        tokens = np.repeat(tokens[:, None], info.num_steps, 1)
        return StepResult(info.epoch, info.step, tokens, num_steps=info.num_steps)


class _Method:
    """An actor's method as ``RunnerGroup`` calls it; the "object ref" is the deferred call."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, info: SchedulerInfo) -> Callable[[], Any]:
        return lambda: self._method(info)


class _Handle:
    def __init__(self, actor: Any) -> None:
        self.execute = _Method(actor.execute)


class _NoRay:
    """Replaces ``ray`` in runner_group.py; ``get`` makes the calls."""

    @staticmethod
    def get(refs: list[Callable[[], Any]], timeout: float) -> list[Any]:
        return [ref() for ref in refs]


def guarded(runner: Any) -> group.RunnerGroup:
    """Wraps a runner as in production, in one process."""
    actor_class: Any = ModelRunnerActor
    actor = actor_class.__ray_metadata__.modified_class(FOR_EVER)
    actor._runner = runner
    runners = group.RunnerGroup(EngineArgs(), "cost")
    runners._runners = [_Handle(actor)]
    return runners


class Unguarded:
    """Replaces the quarantine: only schedules, and watches no request."""

    num_suspects = 0

    def __init__(self, quarantine: Any) -> None:
        self._scheduler, self.depth = quarantine._scheduler, quarantine._steps_in_flight

    def check(self, source: EngineRequest) -> None: ...

    def watch(self, request: Any) -> None: ...

    def discard(self, request: Any) -> None: ...

    def observe(self, info: SchedulerInfo, result: StepResult) -> None:
        self._scheduler.observe(info, result)

    def schedule(self) -> tuple[Int64Array, list[Chunk]]:
        decided: tuple[Int64Array, list[Chunk]] = self._scheduler.schedule()
        return decided


class NoLogs:
    """Replaces the logs of ended requests."""

    def keep(self, *_: Any) -> None: ...


class Side:
    """One engine and its loop."""

    def __init__(self, config: EngineConfig, runner: Any, *, recovers: bool) -> None:
        self._recovers = recovers
        self._engine = Engine(
            config, guarded(runner) if recovers else InlineExecutor(runner, config)
        )
        if not recovers:
            self._engine._quarantine = Unguarded(self._engine._quarantine)  # type: ignore[assignment]
            self._engine._logs = NoLogs()  # type: ignore[assignment]
        self._subscriptions = Subscriptions()
        self._subscriptions.renew(CLIENT)

    def fill(self, rows: int) -> None:
        """Adds ``rows`` requests with different prompts."""
        for key in range(rows):
            prompt = np.full(PROMPT_TOKENS, 300 + key, np.int32)
            self._engine.add(
                EngineRequest(
                    str(key),
                    prompt,
                    Sampling(),
                    StopRules(MODEL_LEN - PROMPT_TOKENS),
                    client=CLIENT,
                    key=key,
                    receipt=Receipt(str(key), 0, b""),
                )
            )

    def turn(self) -> None:
        """One iteration of the scheduler's loop, as in its actor."""
        time.monotonic()
        self._subscriptions.post(self._engine.step())
        if self._recovers:
            self._subscriptions.silent(CLIENT_LEASE_SECONDS)

    def seconds(self, rows: int, steps: int) -> float:
        """CPU seconds per iteration over the whole life of ``rows`` requests."""
        self.fill(rows)
        for _ in range(WARM_UP):
            self.turn()
        started = time.process_time()
        for _ in range(steps):
            self.turn()
        spent = time.process_time() - started
        self._engine.abort_client(CLIENT)
        while self._engine.has_work:
            self.turn()
        return spent / steps


def config_for(rows: int) -> EngineConfig:
    """A configuration with room for ``rows`` long requests."""
    return EngineConfig(
        limits=BatchLimits(max_batch_tokens=8192, max_decoding_batch=rows, max_prefill_batch=rows),
        max_model_len=MODEL_LEN,
        vocab_size=2048,
        page_size=16,
        num_pages=rows * MODEL_LEN // 16 + 8,
        scheduler="v1",
        policy="fcfs",
        max_waiting_requests=1000,
        steps_in_flight=2,
    )


def difference(rows: int, rounds: int) -> tuple[float, float]:
    """(µs of a step without, µs more with): medians of rounds that take turns."""
    runner = StubRunner()
    sides = [Side(config_for(rows), runner, recovers=recovers) for recovers in (False, True)]
    bare, more = [], []
    for round_ in range(rounds + 1):
        order = sides if round_ % 2 else sides[::-1]
        spent = {side: side.seconds(rows, STEPS) for side in order}
        if round_:  # the first round warms up
            bare.append(spent[sides[0]])
            more.append(spent[sides[1]] - spent[sides[0]])
    return 1e6 * statistics.median(bare), 1e6 * statistics.median(more)


def model_side(rows: int, *, check_pages: bool) -> Side:
    """The demo model without fault tolerance, on one thread."""
    from rayfin.actors.runner.model_runner import ModelRunner

    args = EngineArgs(
        model=str(DEMO_FOLDER),
        device="cpu",
        threads=1,
        kv_cache_memory=2**28,
        max_decoding_batch=rows,
        check_pages=check_pages,
    )
    runner = ModelRunner(args)
    config = resolve(args, *runner.profile())
    runner.start(config, 0)
    return Side(config, runner, recovers=False)


def model_step(rows: int, rounds: int) -> tuple[float, float]:
    """µs of CPU time of (a call of the demo model, what --check-pages adds to it)."""
    sides = [model_side(rows, check_pages=check) for check in (False, True)]
    bare, more = [], []
    for round_ in range(rounds + 1):
        order = sides if round_ % 2 else sides[::-1]
        spent = {side: side.seconds(rows, MODEL_STEPS) for side in order}
        if round_:
            bare.append(spent[sides[0]])
            more.append(spent[sides[1]] - spent[sides[0]])
    return 1e6 * statistics.median(bare), 1e6 * statistics.median(more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", default="1,16,64", help="comma-separated numbers of decoding requests"
    )
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    group.ray = _NoRay  # type: ignore[assignment]
    gc.disable()
    print(
        "| requests | scheduler's step, us | recovery, us more | with the model, us | share "
        "| --check-pages, us more | share |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for rows in map(int, options.rows.split(",")):
        bare, more = difference(rows, options.rounds)
        whole, checks = model_step(rows, max(3, options.rounds // 3))
        print(
            f"| {rows} | {bare:.0f} | {more:+.1f} | {whole:,.0f} | {more / whole:+.2%} "
            f"| {checks:+.1f} | {checks / whole:+.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
