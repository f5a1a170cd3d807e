"""The cost of fault tolerance: of steps without faults, and of a killed runner or scheduler.

    python benchmarks/recovery.py steps [--rows 1,16,64] [--rounds 15]
    python benchmarks/recovery.py kill [--kill scheduler] [--shape 135m] [--weights-cache]
    python benchmarks/recovery.py kill --disk --shape 135m --streams 4 --prompt-tokens 1000

steps: the same ones with and without it. *With*: the step goes through RunnerGroup and
ModelRunnerActor as in production (failpoints, timeouts, leases, epochs) without Ray's call in
between, and the engine watches suspects, keeps token logs and looks for silent clients. *Without*:
the engine calls the runner directly. Figures are CPU microseconds of the process, which other load
hardly changes; rounds alternate. A step is one call to the runner. The share is of a call of the
demo model on the CPU, the smallest model, with the default number of decode steps. --check-pages,
off by default, is measured on that model too.
kill: how long it pauses a stream. Two applications run on one Ray of the script's own: an engine
with ``spare_runners`` 0, and one with 1; with --disk both have a spare, and one has
``kv_disk_path``. They take turns: streams start, their runner or scheduler is killed (SIGKILL), and
the pause is the longest gap between two events of a stream. Each round waits until the spare is
ready. The model is the built-in one, or one of random weights of a size in shapes.py.
"""

import argparse
import asyncio
import gc
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from ray import serve
from sections import run
from server import free_ports

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
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.processes.environment import set_ray_environment
from rayfin.actors.runner.actor import ModelRunnerActor
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.scheduler import runner_group as group
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.step_builder import Chunk
from rayfin.actors.scheduler.subscriptions import Subscriptions
from rayfin.actors.timing import CLIENT_LEASE_SECONDS
from rayfin.deployments.app import bind_app
from rayfin.deployments.client.engine_names import find_engine
from rayfin.deployments.serve.preflight import DEMO_FOLDER
from rayfin.deployments.serve.server_args import ServerArgs

CLIENT = "client"
MODEL_LEN = 2048
PROMPT_TOKENS = 100
WARM_UP, STEPS, MODEL_STEPS = 40, 400, 60
FOR_EVER = 1e9  # seconds, for leases


class StubRunner:
    """Always returns the same token, at no cost."""

    def __init__(self) -> None:
        self.next_step = (0, 0)  # epoch and number

    def start(self, config: EngineConfig, epoch: int) -> None:
        self.next_step = (epoch, 0)

    def begin(self, info: SchedulerInfo) -> bool:
        """Queues no step ahead."""
        return False

    def execute(self, info: SchedulerInfo) -> StepResult:
        self.next_step = (info.epoch, info.step + 1)
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
        self._scheduler, self._steps_in_flight = quarantine._scheduler, quarantine._steps_in_flight

    @property
    def depth(self) -> int:
        depth: int = self._steps_in_flight()
        return depth

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
            self._engine._endings.logs = NoLogs()  # type: ignore[assignment]
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


def steps() -> None:
    parser = argparse.ArgumentParser()
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


BEFORE, LENGTH = 20, 120
"""Tokens of a stream before the process is killed, and in all."""

PATIENCE = 600.0  # seconds; only a failure waits so long


@dataclass(frozen=True, slots=True)
class App:
    """An application with one engine."""

    name: str
    url: str
    spares: int

    def scheduler(self) -> Any:
        return until(lambda: find_engine(self.name), "an engine is registered")

    def settle(self) -> None:
        """Waits until the engine is idle and its spares are ready."""

        def settled() -> bool:
            stats: EngineStats = ray.get(self.scheduler().stats.remote())
            return not stats.running + stats.waiting and stats.spare_runners == self.spares

        until(settled, "the spare is ready")

    def pid(self, what: str) -> int:
        """The process id of its runner or its scheduler."""
        scheduler = self.scheduler()
        if what == "runner":
            (process,) = ray.get(scheduler.runners.remote())
        else:
            process = ray.get(scheduler.process.remote())
        return int(process.pid)

    async def pause(self, what: str, prompts: list[list[int]]) -> float:
        """The longest gap of streams whose runner or scheduler is killed, seconds."""
        pid, left = self.pid(what), len(prompts)

        async def stream(http: httpx.AsyncClient, prompt: list[int]) -> float:
            nonlocal left
            body = {"prompt": prompt, "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
            times = list[float]()
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        assert '"error"' not in line, line
                        times.append(time.perf_counter())
                        left -= len(times) == BEFORE
                        if len(times) == BEFORE and not left:
                            os.kill(pid, signal.SIGKILL)
            times = times[BEFORE - 1 :]  # streams that began before have waited for others' prompts
            return max(later - earlier for earlier, later in zip(times, times[1:], strict=False))

        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as http:
            return max(await asyncio.gather(*(stream(http, prompt) for prompt in prompts)))


def until(probe: Callable[[], Any], what: str) -> Any:
    """The first truthy answer of ``probe``."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := probe()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"never happened: {what}")
        time.sleep(0.1)
    return answer


def make_model(folder: Path, shape: str) -> str:
    """Saves random weights of a real size, with the built-in model's tokenizer."""
    import engines  # imports torch

    engines.make_model(folder, shape, "float32")
    return str(folder)


def deploy(port: int, name: str, settings: dict[str, Any]) -> App:
    engine = EngineArgs(**settings)
    serve.run(bind_app(ServerArgs(), engine), name=name, route_prefix=f"/{name}")
    return App(name, f"http://127.0.0.1:{port}/{name}", settings["spare_runners"])


def measure(apps: list[App], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each pause, by application."""
    pauses: dict[str, list[float]] = {app.name: [] for app in apps}
    draw = random.Random(0)
    for round_ in range(options.rounds):
        for app in apps if round_ % 2 else apps[::-1]:
            for each in apps:
                each.settle()
            prompts = [
                [draw.randrange(300) for _ in range(options.prompt_tokens)]
                for _ in range(options.streams)
            ]
            pauses[app.name].append(asyncio.run(app.pause(options.kill, prompts)))
    return pauses


def memory(apps: list[App]) -> list[str]:
    """What the spares' processes hold, as the system counts it."""
    from rayfin.actors.processes.registry import find_actor, runner_name

    lines = []
    for app in apps:
        engine = ray.get(app.scheduler().info.remote()).name
        for seat in range(app.spares + 1):
            actor = find_actor(runner_name(engine, seat))
            if actor is None:
                continue
            state = ray.get(actor.ping.remote())
            sums = Path(f"/proc/{state.process.pid}/smaps_rollup").read_text().splitlines()
            kib = {line.split()[0]: int(line.split()[1]) for line in sums if line.endswith(" kB")}
            private = kib["Private_Clean:"] + kib["Private_Dirty:"]
            what = "runner" if state.serves else "spare"
            lines.append(
                f"{app.name}: {what}: {kib['Rss:'] / 1024:.0f} MiB in memory, of which "
                f"{private / 1024:.0f} MiB are its own alone"
            )
    return lines


def kill() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", choices=("runner", "scheduler"), default="runner")
    parser.add_argument("--shape", help="a size of shapes.py; default: the built-in model")
    parser.add_argument("--weights-cache", action="store_true", help="with packed weights")
    parser.add_argument("--disk", action="store_true", help="compare with and without a disk")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as folder:
        settings: dict[str, Any] = {"model": "demo", "kv_cache_memory": 1 << 28}
        if options.shape:
            settings["model"] = make_model(Path(folder, "model"), options.shape)
            settings["max_model_len"] = 2048
        if options.weights_cache:
            settings["weights_cache"] = str(Path(folder, "weights"))
        set_ray_environment()
        ray.init(
            address="local",
            _temp_dir=folder,
            include_dashboard=False,
            num_cpus=4,
            log_to_driver=False,
            logging_level="ERROR",
        )
        (port,) = free_ports(1)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            settings["spare_runners"] = 1
            if options.disk:
                other: dict[str, dict[str, Any]] = {
                    "without-disk": {},
                    "disk": {"kv_disk_path": str(Path(folder, "pages"))},
                }
            else:
                other = {"spares-0": {"spare_runners": 0}, "spares-1": {}}
            apps = [deploy(port, name, settings | changes) for name, changes in other.items()]
            pauses = measure(apps, options)
            apps[1].settle()
            print(f"| engine | {options.kill} killed: pause, s: median | longest | all |")
            print("| --- | --- | --- | --- |")
            for name, times in pauses.items():
                each = ", ".join(f"{seconds:.2f}" for seconds in times)
                print(f"| {name} | {statistics.median(times):.2f} | {max(times):.2f} | {each} |")
            print(*memory(apps), sep="\n")
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    run(__doc__, steps, kill)
