"""Measures how long a killed runner or scheduler pauses a stream, with and without a spare runner.

    python benchmarks/takeover.py [--kill scheduler] [--shape 135m] [--weights-cache] [--rounds 5]
    python benchmarks/takeover.py --disk --shape 135m --streams 4 --prompt-tokens 1000

Two applications run on one Ray of the script's own: an engine with ``spare_runners`` 0, and one
with 1; with --disk both have a spare, and one has ``kv_disk_path``. They take turns: streams start,
their runner or scheduler is killed (SIGKILL), and the pause is the longest gap between two events
of a stream. Each round waits until the spare is ready. The model is the built-in one, or one of
random weights of a size in shapes.py.
"""

import argparse
import asyncio
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
import ray
from ray import serve
from server import free_ports

from rayfin.actors.config import EngineArgs
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.processes.environment import set_ray_environment
from rayfin.deployments.app import bind_app
from rayfin.deployments.client.engine_names import find_engine
from rayfin.deployments.serve.server_args import ServerArgs

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
            own = kib["Private_Clean:"] + kib["Private_Dirty:"]
            what = "runner" if state.serves else "spare"
            lines.append(
                f"{app.name}: {what}: {kib['Rss:'] / 1024:.0f} MiB in memory, of which "
                f"{own / 1024:.0f} MiB are its own alone"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
            apps = [deploy(port, name, settings | own) for name, own in other.items()]
            pauses = measure(apps, options)
            apps[1].settle()
            print(f"| engine | {options.kill} killed: pause, s: median | longest | all |")
            print("| --- | --- | --- | --- |")
            for name, found in pauses.items():
                each = ", ".join(f"{seconds:.2f}" for seconds in found)
                print(f"| {name} | {statistics.median(found):.2f} | {max(found):.2f} | {each} |")
            print(*memory(apps), sep="\n")
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
