"""What recovery costs while nothing fails: the same steps with its machinery and without.

    python benchmarks/recovery.py [--rows 1,16,64] [--rounds 15]

*With*: the step goes through RunnerGroup and ModelRunnerActor as in production (failpoints, limits
of time, leases, epochs), with Ray's call in the middle taken out, and the engine watches suspects,
keeps token logs and looks for silent clients. *Without*: the engine calls the runner. Microseconds
of CPU time of the process, which other work on the machine hardly changes; rounds take turns.

A step here is a call to the runner; the share is of one of the demo model on the CPU, the smallest
that anybody serves, with as many decode steps in it as an engine grants by default. What
--check-pages adds, which is off by default, is measured on that model, too.
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
FOR_EVER = 1e9  # seconds, of leases


class StubRunner:
    """Says the same token always, at no cost."""

    def start(self, config: EngineConfig, epoch: int) -> None: ...

    def execute(self, info: SchedulerInfo) -> StepResult:
        tokens = np.where(info.last_pos >= 0, 7, NO_TOKEN).astype(np.int32)
        return StepResult(info.epoch, info.step, np.repeat(tokens[:, None], info.num_steps, 1))


class _Method:
    """An actor's method as ``RunnerGroup`` calls it; the "object ref" is the call to be made."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, info: SchedulerInfo) -> Callable[[], Any]:
        return lambda: self._method(info)


class _Handle:
    def __init__(self, actor: Any) -> None:
        self.execute = _Method(actor.execute)


class _NoRay:
    """In place of ``ray`` in group.py: to get is to call."""

    @staticmethod
    def get(refs: list[Callable[[], Any]], timeout: float) -> list[Any]:
        return [ref() for ref in refs]


def guarded(runner: Any) -> group.RunnerGroup:
    """The production's way to a runner, in one process."""
    actor_class: Any = ModelRunnerActor
    actor = actor_class.__ray_metadata__.modified_class(FOR_EVER)
    actor._runner = runner
    own = group.RunnerGroup(EngineArgs(), "cost")
    own._runners = [_Handle(actor)]
    return own


class Unguarded:
    """In place of the quarantine: the scheduler alone, and nobody is watched."""

    num_suspects = 0

    def __init__(self, quarantine: Any) -> None:
        self._scheduler, self.depth = quarantine._scheduler, quarantine._steps_in_flight

    def check(self, source: EngineRequest) -> None: ...

    def watch(self, request: Any) -> None: ...

    def forget(self, request: Any) -> None: ...

    def observe(self, *, out_of_memory: bool) -> None:
        self._scheduler.observe(out_of_memory=out_of_memory)

    def schedule(self) -> tuple[Int64Array, list[Chunk]]:
        decided: tuple[Int64Array, list[Chunk]] = self._scheduler.schedule()
        return decided


class NoLogs:
    """In place of the logs of requests that have ended."""

    def keep(self, *_: Any) -> None: ...


class Side:
    """One engine and what turns its loop."""

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
        """As many requests as that, of prompts that differ."""
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
        """A turn of the scheduler's loop, as in its actor."""
        time.monotonic()
        self._subscriptions.post(self._engine.step())
        if self._recovers:
            self._subscriptions.silent(CLIENT_LEASE_SECONDS)

    def seconds(self, rows: int, steps: int) -> float:
        """CPU seconds of a turn, of the whole life of requests: taken in, stepped, ended."""
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
    """Room for so many long requests."""
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
        if round_:  # the first one warms up
            bare.append(spent[sides[0]])
            more.append(spent[sides[1]] - spent[sides[0]])
    return 1e6 * statistics.median(bare), 1e6 * statistics.median(more)


def model_side(rows: int, *, check_pages: bool) -> Side:
    """The demo model without the machinery, on one thread."""
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
    parser.add_argument("--rows", default="1,16,64", help="requests that decode, with commas")
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
