"""What it costs to have pages of another engine, beside computing them.

    python benchmarks/pages.py miss [--streams 8] [--prompt-tokens 2000] [--shape 135m]
    python benchmarks/pages.py drain [--streams 8] [--prompt-tokens 2000]
    python benchmarks/pages.py apart [--seconds 60] [--prompt-tokens 1000] [--every 10]
    python benchmarks/pages.py fresh [--prompt-tokens 1000]
    python benchmarks/pages.py death [--streams 4] [--prompt-tokens 1000] [--only scheduler]
    python benchmarks/pages.py nothing [--seconds 60] [--streams 8] [--prompt-tokens 256]
    python benchmarks/pages.py served [--megabytes 50] [--seconds 60]
    python benchmarks/pages.py names

miss: seconds to the first token of a prompt that another engine has: read from it, and computed.
That engine is idle, and has so many streams.
drain: the longest gap of streams whose engine drains while another one is there, how many of their
tokens are computed again, and the seconds until the engine has no request left. Computed: the
engine hands them back, and pages are not asked for.
apart: one engine and one for prompts, beside two that do both, with the same requests: streams
without a pause, and a long prompt every few seconds. Then short prompts only.
fresh: the first token of an engine that has computed nothing yet, of a prompt that another has.
death: the longest gap of streams, and how many of their tokens are computed again, when their
scheduler is killed, with a prefix cache and without one; when their runner is, and when one of two
engines is, with --kv-disk-path in the folder and with neither that nor --kv-peers.
nothing: streams with new prompts on two engines with --kv-peers and on two without, in turns.
served: streams of an engine whose pages another one reads, so many megabytes a second, and none.
names: the share of a scheduler's step of 64 rows that it takes to say what pages hold; no Ray.

Each starts a Ray of its own, engines with one thread each, and a model of random weights of a size
in shapes.py. Rounds of the two sides alternate, in one run.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import serve
from sections import run
from server import free_ports

from rayfin.actors.config import EngineArgs
from rayfin.actors.messages import Command, EngineRequest, PagesAt, Sampling, StopRules
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.processes.environment import set_ray_environment
from rayfin.deployments.app import bind_app
from rayfin.deployments.client.engine_names import find_engines
from rayfin.deployments.client.pool import EnginePool
from rayfin.deployments.client.routing import Candidate, PrefixAware
from rayfin.deployments.serve.server_args import ServerArgs

LONG, SHORT, LENGTH = 1000, 24, 200
VOCABULARY = 2000
NUMBERS = itertools.count(1)
DEATHS = {
    "scheduler": ("with names", "no prefix cache"),
    "runner": ("in a folder", "nowhere"),
    "engine": ("in a folder", "nowhere"),
}
DRAW = random.Random(0)


class Pinned(PrefixAware):
    """Sends requests to ``home``, if that engine takes any, with a hint or without one."""

    def __init__(self) -> None:
        super().__init__()
        self.home: str | None = None
        self.hint: PagesAt | None = None

    def pick(self, request: EngineRequest, candidates: Sequence[Candidate]) -> Candidate:
        chosen = next(
            (candidate for candidate in candidates if candidate.name == self.home), candidates[0]
        )
        request.pages_at = self.hint
        return chosen


@dataclass
class Stream:
    """A request and when its tokens came, in seconds of this process."""

    request: EngineRequest
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int = 0

    async def run(self, pool: EnginePool) -> None:
        self.sent = time.perf_counter()
        async for delta in pool.stream(self.request):
            if delta.tokens:
                self.times.append(time.perf_counter())
                self.tokens += len(delta.tokens)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    def gaps(self, since: float = 0.0) -> list[float]:
        times = [at for at in self.times if at >= since]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def stream(prompt_tokens: int, length: int, prompt: Sequence[int] = ()) -> Stream:
    tokens = prompt or [DRAW.randrange(VOCABULARY) for _ in range(prompt_tokens)]
    number = next(NUMBERS)
    settings = Sampling(temperature=1.0, seed=number), StopRules(length)
    return Stream(EngineRequest(str(number), np.array(tokens, np.int32), *settings, key=number))


@contextmanager
def engines(options: argparse.Namespace, *layouts: dict[str, Any]) -> Iterator[list[str]]:
    """Applications of these settings of the server, and of the engine as ``args``; yields names."""
    import engines as models  # imports torch

    with tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as folder:
        models.make_model(Path(folder, "model"), options.shape, "float32")
        args = EngineArgs(
            model=str(Path(folder, "model")),
            dtype="float32",
            threads=1,
            max_model_len=4096,
            kv_cache_memory=options.gib << 30,
            spare_runners=0,
        )
        set_ray_environment()
        ray.init(
            address="local",
            _temp_dir=folder,
            include_dashboard=False,
            num_cpus=8,
            log_to_driver=False,
            logging_level="ERROR",
        )
        (port,) = free_ports(1)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            names = [f"app{number}" for number in range(len(layouts))]
            for name, layout in zip(names, layouts, strict=True):
                own = replace(args, **layout.pop("args", {}))
                serve.run(bind_app(ServerArgs(**layout), own), name=name, route_prefix=f"/{name}")
            yield names
        finally:
            serve.shutdown()
            ray.shutdown()


async def pool_of(app: str, count: int, router: PrefixAware) -> EnginePool:
    pool = EnginePool(f"bench-{app}", partial(find_engines, app), router)
    while len(pool._ready()) < count:
        await asyncio.sleep(0.1)
    return pool


def stats_of(name: str, app: str) -> EngineStats:
    stats: EngineStats = ray.get(find_engines(app)[name].stats.remote())
    return stats


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


async def measure_misses(options: argparse.Namespace, app: str) -> None:
    router = Pinned()
    pool = await pool_of(app, 2, router)
    first, second = sorted(find_engines(app))
    pages = (options.prompt_tokens - 1) // 16
    print("| the other engine | computed, s | read, s | share |\n|---|---|---|---|")
    await stream(options.prompt_tokens, 2).run(pool)  # each computes once, and meets the other
    router.home = second
    await stream(options.prompt_tokens, 2).run(pool)
    for streams in (0, options.streams):
        taken: dict[bool, list[float]] = {False: [], True: []}
        router.home, router.hint = first, None
        busy = [stream(SHORT, 3000) for _ in range(streams)]
        tasks = [asyncio.create_task(stream.run(pool)) for stream in busy]
        while not all(stream.times for stream in busy):
            await asyncio.sleep(0.01)
        for _ in range(options.rounds):
            for reads in (False, True):
                asked = stream(options.prompt_tokens, 2)
                if reads:
                    router.home, router.hint = first, None
                    await asked.run(pool)
                router.home, router.hint = second, PagesAt(first, pages) if reads else None
                again = stream(0, 2, asked.request.prompt.tolist())
                await again.run(pool)
                taken[reads].append(again.ttft)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        computed, read = median(taken[False]), median(taken[True])
        what = f"has {streams} streams" if streams else "is idle"
        print(f"| {what} | {computed:.2f} | {read:.3f} | {read / computed:.3f} |", flush=True)
    pool.close()


async def measure_drains(options: argparse.Namespace, app: str) -> None:
    router = Pinned()
    pool = await pool_of(app, 2, router)
    names = sorted(find_engines(app))
    handles = find_engines(app)
    print(
        "| | longest gap, s | tokens computed again, of a stream | engine empty after, s |\n"
        "|---|---|---|---|"
    )
    for name in names:
        router.home = name
        await stream(options.prompt_tokens, 2).run(pool)
    for round_ in range(options.rounds):
        for moves in (True, False):
            source, home = names if (round_ + moves) % 2 else names[::-1]
            router.home, router.hint = source, None
            streams = [
                stream(options.prompt_tokens, options.length) for _ in range(options.streams)
            ]
            tasks = [asyncio.create_task(stream.run(pool)) for stream in streams]
            while not all(stream.tokens > 20 for stream in streams):
                await asyncio.sleep(0.01)
            before, began = stats_of(home, app), time.perf_counter()
            router.home = home
            if moves:
                await pool.manage(Command.DRAIN, source.rpartition("/")[2])
            else:
                await handles[source].evict.remote()
            while (left := stats_of(source, app)).running + left.waiting:
                await asyncio.sleep(0.05)
            empty = time.perf_counter() - began
            await asyncio.gather(*tasks)
            after = stats_of(home, app)
            again = (after.prefix_queries - before.prefix_queries) - (
                after.prefix_hits - before.prefix_hits
            )
            gap = max(max(stream.gaps(began - 1.0)) for stream in streams)
            what = "moved" if moves else "computed"
            row = f"{gap:.2f} | {again / options.streams:.0f} | {empty:.1f}"
            print(f"| {what} | {row} |", flush=True)
            await handles[source].manage.remote(Command.ADMIT)
            while len(pool._ready()) < 2:
                await asyncio.sleep(0.1)
    pool.close()


@dataclass
class Load:
    """What clients saw in so many seconds."""

    seconds: float
    streams: list[Stream] = field(default_factory=list)
    long: list[Stream] = field(default_factory=list)
    apart: int = 0  # prompts that were computed at another engine

    def row(self) -> str:
        every = [*self.streams, *self.long]
        gaps = [gap for stream in every for gap in stream.gaps()]
        ttfts = [stream.ttft for stream in self.long if stream.times]
        ttft = f"{median(ttfts):.2f}" if ttfts else "-"
        rate = sum(stream.tokens for stream in every) / self.seconds
        p99 = 1e3 * float(np.quantile(gaps, 0.99))
        return f"{p99:.0f} | {ttft} | {rate:.1f} | {self.apart} of {len(self.long)}"


async def load(
    pool: EnginePool,
    seconds: float,
    streams: int,
    every: float,
    prompt_tokens: int,
    *,
    short: int = SHORT,
) -> Load:
    """Streams one after the other in so many seats, and a long prompt ``every`` seconds."""
    figures = Load(seconds)

    async def seat() -> None:
        while True:
            figures.streams.append(stream(short, LENGTH))
            await figures.streams[-1].run(pool)

    async def long() -> None:
        while every:
            await asyncio.sleep(every)
            figures.long.append(stream(prompt_tokens, 50))
            tasks.append(asyncio.create_task(figures.long[-1].run(pool)))

    def moved(reason: str, result: str) -> None:
        figures.apart += (reason, result) == ("prefill", "moved")

    pool.events.moved = moved
    tasks = [asyncio.create_task(work) for work in (*(seat() for _ in range(streams)), long())]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


async def measure_apart(options: argparse.Namespace, mixed: str, apart: str) -> None:
    pools = {name: await pool_of(name, 2, PrefixAware()) for name in (mixed, apart)}
    for pool in pools.values():  # all engines compute a prompt, so that they know what one takes
        await asyncio.gather(*(stream(options.prompt_tokens, 2).run(pool) for _ in range(3)))
        await asyncio.sleep(2.0)
    print("| | | gaps p99, ms | TTFT of long prompts, s | tokens/s | apart |")
    print("|---|---|---|---|---|---|")
    for what, every in (("with long prompts", options.every), ("short prompts only", 0.0)):
        for name, title in ((mixed, "two that do both"), (apart, "one, and one for prompts")):
            figures = await load(
                pools[name], options.seconds, options.streams, every, options.prompt_tokens
            )
            print(f"| {what} | {title} | {figures.row()} |", flush=True)
            await asyncio.sleep(1.0)
    for pool in pools.values():
        pool.close()


async def measure_fresh(options: argparse.Namespace, app: str) -> None:
    router = Pinned()
    pool = await pool_of(app, 3, router)
    first, second, third = sorted(find_engines(app))
    router.home = first
    await stream(options.prompt_tokens, 2).run(pool)
    asked = stream(options.prompt_tokens, 2)
    await asked.run(pool)
    print("| first at a new engine | seconds to the first token |\n|---|---|")
    hint = PagesAt(first, (options.prompt_tokens - 1) // 16)
    for what, router.home, router.hint in (("computed", second, None), ("read", third, hint)):
        again = stream(0, 2, asked.request.prompt.tolist())
        await again.run(pool)
        print(f"| {what} | {again.ttft:.3f} |", flush=True)
    pool.close()


async def measure_deaths(whom: str, options: argparse.Namespace, *apps: str) -> None:
    """Kills what ``whom`` says of each of ``apps``, in turns."""
    count = 2 if whom == "engine" else 1
    for _ in range(options.rounds):
        for what, app in zip(DEATHS[whom], apps, strict=True):
            router = Pinned()
            pool = await pool_of(app, count, router)
            router.home = source = min(find_engines(app))
            streams = [
                stream(options.prompt_tokens, options.length) for _ in range(options.streams)
            ]
            tasks = [asyncio.create_task(stream.run(pool)) for stream in streams]
            while not all(stream.tokens > 20 for stream in streams):
                await asyncio.sleep(0.01)
            home = max(find_engines(app))
            before = stats_of(home, app) if whom != "scheduler" else EngineStats()
            scheduler: Any = find_engines(app)[source]
            ends = ray.get(scheduler.runners.remote()) if whom != "scheduler" else []
            if whom != "runner":
                ends.append(ray.get(scheduler.process.remote()))
            router.home, began = home, time.perf_counter()
            router.hint = PagesAt(source, 0) if whom == "engine" else None
            for process in ends:
                os.kill(process.pid, signal.SIGKILL)
            await asyncio.gather(*tasks)
            after = stats_of(home, app)
            asked = after.prefix_queries - before.prefix_queries
            again = (asked - after.prefix_hits + before.prefix_hits) / options.streams
            gap = max(max(stream.gaps(began - 1.0)) for stream in streams)
            print(f"| {whom} | {what} | {gap:.2f} | {again:.0f} |", flush=True)
            pool.close()
            await pool_of(app, count, router)


async def measure_nothing(options: argparse.Namespace, peers: str, alone: str) -> None:
    pools = {name: await pool_of(name, 2, PrefixAware()) for name in (peers, alone)}
    for pool in pools.values():
        await asyncio.gather(*(stream(options.prompt_tokens, 2).run(pool) for _ in range(3)))
    rates: dict[str, list[float]] = {name: [] for name in pools}
    for round_ in range(options.rounds):
        for name in (peers, alone)[:: 1 if round_ % 2 else -1]:
            seats = options.streams
            figures = await load(
                pools[name], options.seconds, seats, 0.0, 0, short=options.prompt_tokens
            )
            rates[name].append(sum(each.tokens for each in figures.streams) / options.seconds)
            print(f"{'peers' if name == peers else 'none'}: {rates[name][-1]:.1f} tokens/s")
            await asyncio.sleep(1.0)
    ratios = [with_it / none for with_it, none in zip(rates[peers], rates[alone], strict=True)]
    print(f"with peers {median(ratios):.3f} of those without")
    for pool in pools.values():
        pool.close()


async def measure_served(options: argparse.Namespace, app: str) -> None:
    router = Pinned()
    pool = await pool_of(app, 2, router)
    source, reader = sorted(find_engines(app))
    handle: Any = find_engines(app)[reader]
    router.home = source
    asked = stream(options.prompt_tokens, 2)
    await asked.run(pool)
    tokens, pages = asked.request.prompt, (options.prompt_tokens - 1) // 16
    moved = 0

    async def read() -> None:
        nonlocal moved
        while True:
            began = asyncio.get_running_loop().time()
            await handle.manage.remote(Command.RESET_CACHE)
            arrived, _ = await handle.warm.remote(tokens, (), PagesAt(source, pages))
            size = (
                arrived
                * stats_of(reader, app).page_bytes["p2p", "read"]
                / max(1, stats_of(reader, app).pages_read["p2p", "arrived"])
            )
            moved += int(size)
            pause = size / (options.megabytes * 1e6) - asyncio.get_running_loop().time() + began
            await asyncio.sleep(max(pause, 0.01))

    print(
        "| the engine | gaps p99, ms | TTFT | tokens/s | apart | MB/s |\n|---|---|---|---|---|---|"
    )
    for _ in range(options.rounds):
        for what in ("serves none", "serves pages"):
            moved, reading = 0, None
            if what == "serves pages":
                reading = asyncio.create_task(read())
            figures = await load(pool, options.seconds, options.streams, 0.0, 0)
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            rate = moved / options.seconds / 1e6
            print(f"| {what} | {figures.row()} | {rate:.0f} |", flush=True)
    pool.close()


def _options(**more: tuple[type, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    settings: dict[str, tuple[type, Any]] = {
        "shape": (str, "135m"),
        "gib": (int, 2),
        "streams": (int, 8),
        "rounds": (int, 3),
        **more,
    }
    for name, (kind, default) in settings.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    return parser.parse_args()


def _measure(
    options: argparse.Namespace,
    measurement: Callable[..., Awaitable[None]],
    *layouts: dict[str, Any],
) -> None:
    with engines(options, *layouts) as apps:
        asyncio.run(measurement(options, *apps))  # type: ignore[arg-type]


def miss() -> None:
    _measure(_options(prompt_tokens=(int, 2000)), measure_misses, {"data_parallel_size": 2})


def drain() -> None:
    options = _options(prompt_tokens=(int, 2000), length=(int, 100))
    _measure(options, measure_drains, {"data_parallel_size": 2})


def apart() -> None:
    options = _options(prompt_tokens=(int, LONG), seconds=(float, 60.0), every=(float, 10.0))
    layouts = {"data_parallel_size": 2}, {"prefill_engines": 1}
    _measure(options, measure_apart, *layouts)


def fresh() -> None:
    _measure(_options(prompt_tokens=(int, 1000)), measure_fresh, {"data_parallel_size": 3})


def death() -> None:
    options = _options(
        streams=(int, 4),
        prompt_tokens=(int, 1000),
        length=(int, 200),
        folder=(str, "/dev/shm"),
        only=(str, "all"),
    )
    with tempfile.TemporaryDirectory(prefix="rf-pages-", dir=options.folder) as folder:
        print("| killed | pages | longest gap, s | tokens computed again, of a stream |")
        print("|---|---|---|---|", flush=True)
        for whom in DEATHS if options.only == "all" else [options.only]:
            other = {"prefix_caching": False} if whom == "scheduler" else {"kv_peers": False}
            kept = {} if whom == "scheduler" else {"kv_disk_path": folder}
            count = 2 if whom == "engine" else 1
            layouts: list[dict[str, Any]] = [
                {"data_parallel_size": count, "args": {"spare_runners": 1, **more}}
                for more in (kept, other)
            ]
            _measure(options, partial(measure_deaths, whom), *layouts)


def nothing() -> None:
    options = _options(prompt_tokens=(int, 256), seconds=(float, 60.0))
    two: dict[str, Any] = {"data_parallel_size": 2}
    _measure(options, measure_nothing, two, {**two, "args": {"kv_peers": False}})


def served() -> None:
    options = _options(prompt_tokens=(int, 1000), seconds=(float, 60.0), megabytes=(float, 50.0))
    _measure(options, measure_served, {"data_parallel_size": 2})


def names() -> None:
    import core_scheduler

    from rayfin.cache.page_tables import PageTables

    options, changes, spent = _options(rows=(int, 64)), PageTables.name_changes, 0.0

    def timed(tables: PageTables) -> Any:
        nonlocal spent
        began = time.thread_time()
        changed = changes(tables)
        spent += time.thread_time() - began
        return changed

    PageTables.name_changes = timed  # type: ignore[method-assign]
    for _ in range(options.rounds):
        case, spent = core_scheduler.steps_case(options.rows, steps=1000), 0.0
        steps = core_scheduler.Rayfin().ask(case)["step"]
        warm = 1 + core_scheduler.WARM_STEPS / len(steps)
        print(
            f"{sum(steps) / len(steps) * 1e6:.0f} us a step, names {spent / warm / sum(steps):.3f}"
        )


if __name__ == "__main__":
    run(__doc__, miss, drain, apart, fresh, death, nothing, served, names)
