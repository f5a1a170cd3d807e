"""A server under load: engines that start and stop, and scrapes of /metrics.

    python benchmarks/serving.py autoscaling [--users 24] [--staying 2] [--idle-timeout 10]
    python benchmarks/serving.py scrape [--seconds 30] [--hostile 10000]

autoscaling: one engine, two under load, and one again, on a local Ray cluster. Some users stay
while an engine stops. Answers are greedy, and a repeated question must get the same answer. The
exit status is 1 if an answer differs, a request fails, or the engines do not follow.
scrape: /metrics of an overloaded server, and after invalid requests. Prints the times of scrapes on
the API's port and on the hub's port, and the hub's CPU time per scrape, which does not depend on
other load. The results are in docs/observability.md.
"""

import argparse
import asyncio
import itertools
import os
import random
import string
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import httpx
import ray
from ray import serve
from sections import run
from server import free_ports, served

from rayfin.actors.config import EngineArgs
from rayfin.deployments.app import bind_app
from rayfin.deployments.client.engine_names import find_engines
from rayfin.deployments.serve.server_args import ServerArgs

APP = "autoscaling"
PATIENCE = 240.0  # seconds for a change of the number of engines
LOOK_SECONDS = 0.5
PAGES_MEMORY = 2 * 1024**2  # bytes: the users' answers fill it
OUTPUT_TOKENS = 200
QUESTIONS = 4  # of each user, repeated


@dataclass(slots=True)
class Users:
    """Users that each ask, read the whole answer and ask again until they leave."""

    url: str
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _answers: dict[str, list[int]] = field(default_factory=dict)  # by question
    _users: list[tuple[threading.Event, threading.Thread]] = field(default_factory=list)

    def start(self, count: int) -> None:
        for number in range(count):
            leave = threading.Event()
            thread = threading.Thread(target=self._run_user, args=(number, leave))
            self._users.append((leave, thread))
            thread.start()

    def leave(self, staying: int = 0) -> None:
        """Stops all but ``staying`` users and waits for their answers."""
        leaving, self._users = self._users[staying:], self._users[:staying]
        for leave, _ in leaving:
            leave.set()
        for _, thread in leaving:
            thread.join()

    def _run_user(self, number: int, leave: threading.Event) -> None:
        with httpx.Client(base_url=self.url, timeout=PATIENCE) as http:
            for turn in itertools.cycle(range(QUESTIONS)):
                if leave.is_set():
                    return
                self._ask(http, f"User {number}, question {turn}: What is the capital of")

    def _ask(self, http: httpx.Client, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        try:
            reply = http.post("/v1/completions", json=body)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        tokens = reply.json()["choices"][0]["token_ids"]
        if len(tokens) != OUTPUT_TOKENS or self._answers.setdefault(prompt, tokens) != tokens:
            self.failures.append(f"{prompt!r}: the answer differs from before")
        self.answered += 1


class EngineLog:
    """Prints the number of engines whenever it changes."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self._began = time.monotonic()
        self._last = -1

    def until(self, wanted: int) -> None:
        """Waits for this number of engines.

        Raises:
            TimeoutError: it is not reached.
        """
        deadline = time.monotonic() + PATIENCE
        while self._last != wanted:
            engines = len(find_engines(APP))
            if engines != self._last:
                self._last = engines
                self.log(f"{engines} engine{'' if engines == 1 else 's'}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"never reached {wanted} engines")
            time.sleep(LOOK_SECONDS)

    def log(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        users = self._users
        counts = f"answered {users.answered}, failed {len(users.failures)}"
        print(f"{seconds:7.1f} s  {text:20}  {counts}", flush=True)


def follow(users: Users, timeline: EngineLog, count: int, staying: int) -> None:
    timeline.until(1)
    users.start(count)
    timeline.log(f"{count} users start")
    try:
        timeline.until(2)
        time.sleep(10 * LOOK_SECONDS)
        users.leave(staying)
        timeline.log(f"{staying} users stay")
        timeline.until(1)
        time.sleep(10 * LOOK_SECONDS)
    finally:
        users.leave()
    timeline.log("all users left")


def autoscaling() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--staying", type=int, default=2)
    parser.add_argument("--idle-timeout", type=float, default=10.0)
    options = parser.parse_args()
    (port,) = free_ports(1)
    users = Users(f"http://127.0.0.1:{port}")
    with tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            _temp_dir=folder,
            include_dashboard=False,
            num_cpus=4,
            log_to_driver=False,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            server = ServerArgs(min_engines=1, max_engines=2, idle_timeout=options.idle_timeout)
            engine = EngineArgs(threads=1, max_model_len=512, kv_cache_memory=PAGES_MEMORY)
            serve.run(bind_app(server, engine), name=APP)
            follow(users, EngineLog(users), options.users, options.staying)
        finally:
            ray.shutdown()
    for failure in users.failures[:5]:
        print(failure)
    return 1 if users.failures else 0


SLOTS, WAITING = 16, 32
"""Limits of the engine, far below ``USERS``; other requests are refused."""

USERS = 96
WARM_UP = 5.0  # seconds until all users have started

AT_ONCE = 5  # consecutive scrapes of a port in each second
IDLE_SCRAPES = 100
CONNECTIONS = 8  # of the attack
METHODS = ("GET", "POST", "PUT", "DELETE", "BREW", "PROPFIND")


async def user(http: httpx.AsyncClient) -> None:
    """Requests long answers in a loop, refused or not."""
    body = {"prompt": "Hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
    while True:
        with suppress(httpx.HTTPError):
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass
        await asyncio.sleep(0.25)


def crowd(api: str) -> None:
    """Runs all users until this process is terminated."""

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=api, timeout=60, limits=limits) as http:
            await asyncio.gather(*(user(http) for _ in range(USERS)))

    asyncio.run(run())


@contextmanager
def crowded(api: str) -> Iterator[None]:
    """Runs the crowd in another process, so that it does not delay the scrapes' timing."""
    process = get_context("spawn").Process(target=crowd, args=(api,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def nonsense(rng: random.Random, http: httpx.AsyncClient) -> httpx.Request:
    """A request with a random path, method, model, tenant and id."""

    def word() -> str:
        return "".join(rng.choices(string.ascii_letters + "-_.~%{}\"'", k=rng.randint(1, 60)))

    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/metrics/", f"/{word()}"))
    body = {"model": word(), "prompt": word(), "user": word(), word(): word()}
    headers = {"X-Request-Id": word(), "X-Session-Id": word(), "Authorization": f"Bearer {word()}"}
    method = "POST" if path.startswith("/v1") else rng.choice(METHODS)
    return http.build_request(method, path, json=body, headers=headers)


async def attack(http: httpx.AsyncClient, count: int) -> None:
    """Sends ``count`` requests that are all refused, several at a time."""
    rng = random.Random(0)
    left = iter(range(count))

    async def one_after_the_other() -> None:
        for _ in left:
            with suppress(httpx.HTTPError):
                await http.send(nonsense(rng, http))

    await asyncio.gather(*(one_after_the_other() for _ in range(CONNECTIONS)))


class Scraper:
    """Scrapes one port and keeps the series of the last scrape."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.series: set[str] = set()
        self._url = url

    async def scrape(self, times: int) -> list[float]:
        """Returns the seconds of consecutive scrapes on one connection, ascending."""
        seconds = []
        async with httpx.AsyncClient(timeout=60) as http:
            for _ in range(times):
                started = time.perf_counter()
                text = (await http.get(self._url)).raise_for_status().text
                seconds.append(time.perf_counter() - started)
        lines = (line for line in text.splitlines() if not line.startswith("#"))
        self.series = {line.rpartition(" ")[0] for line in lines}
        return sorted(seconds)


def summary(seconds: list[float]) -> str:
    """Median and 99th percentile of times in ascending order."""
    median, p99 = seconds[len(seconds) // 2], seconds[int(0.99 * len(seconds))]
    return f"{1000 * median:6.1f} {1000 * p99:6.1f}"


@contextmanager
def cpu_time_each(what: str, process: str, times: int) -> Iterator[None]:
    """Prints the CPU time of ``process`` in the block, divided by ``times``."""
    before = _cpu_seconds(process)
    yield
    print(f"{what}: {1000 * (_cpu_seconds(process) - before) / times:.1f} ms of CPU time each")


def _cpu_seconds(name: str) -> float:
    """CPU time of all processes whose command line begins with ``name``."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (folder / "cmdline").read_bytes().startswith(name.encode()):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def overload(ports: list[Scraper], seconds: int) -> None:
    """Prints a line for each second, and one for all."""
    every: list[list[float]] = [[] for _ in ports]
    print(f"{USERS} users of {SLOTS} slots; ms, median and p99 of each second")
    print("second  " + "  ".join(f"{port.name:>13}" for port in ports))
    for second in range(seconds):
        end = time.monotonic() + 1.0
        scrapes = [await port.scrape(AT_ONCE) for port in ports]
        for seconds_of_port, more in zip(every, scrapes, strict=True):
            seconds_of_port += more
        print(f"{second:6}  " + "  ".join(map(summary, scrapes)), flush=True)
        await asyncio.sleep(max(0.0, end - time.monotonic()))
    print("   all  " + "  ".join(summary(sorted(times)) for times in every))


async def measure(api: str, hub: str, seconds: int, hostile: int) -> None:
    ports = [Scraper("API's port", f"{api}/metrics"), Scraper("hub's port", f"{hub}/metrics")]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=api, timeout=60, limits=limits) as http:
        (await http.post("/v1/completions", json={"prompt": "Hello"})).raise_for_status()
        for port in ports:
            with cpu_time_each(f"{port.name}, idle: the hub", "ray::MetricsHub", IDLE_SCRAPES):
                seconds_each = await port.scrape(IDLE_SCRAPES)
            print(f"{port.name}, idle, ms: {summary(seconds_each)}")
        with crowded(api):
            await asyncio.sleep(WARM_UP)
            await overload(ports, seconds)
        before = [port.series for port in ports]
        await attack(http, hostile)
        for port, series in zip(ports, before, strict=True):
            await port.scrape(1)
            more = len(port.series - series)
            print(f"{port.name}: {len(series)} series, {more} more after {hostile} requests")


def scrape() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=30, help="seconds of overload")
    parser.add_argument("--hostile", type=int, default=10_000, help="number of invalid requests")
    options = parser.parse_args()
    (port,) = free_ports(1)
    flags = ("--metrics-port", port, "--max-decoding-batch", SLOTS, "--max-waiting-requests")
    with served(*map(str, flags), str(WAITING)) as url:
        hub = f"http://127.0.0.1:{port}"
        asyncio.run(measure(url, hub, options.seconds, options.hostile))


if __name__ == "__main__":
    run(__doc__, autoscaling, scrape)
