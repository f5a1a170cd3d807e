"""Scrapes /metrics of an overloaded server, and after invalid requests.

    python benchmarks/scrape.py [--seconds 30] [--hostile 10000]

Prints the times of scrapes on the API's port and on the hub's port, and the hub's CPU time per
scrape, which does not depend on other load. The results are in docs/observability.md.
"""

import argparse
import asyncio
import os
import random
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

import httpx
from server import free_ports, served

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
        found = [await port.scrape(AT_ONCE) for port in ports]
        for seconds_of_port, more in zip(every, found, strict=True):
            seconds_of_port += more
        print(f"{second:6}  " + "  ".join(map(summary, found)), flush=True)
        await asyncio.sleep(max(0.0, end - time.monotonic()))
    print("   all  " + "  ".join(summary(sorted(times)) for times in every))


async def measure(api: str, hub: str, seconds: int, hostile: int) -> None:
    ports = [Scraper("API's port", f"{api}/metrics"), Scraper("hub's port", f"{hub}/metrics")]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=api, timeout=60, limits=limits) as http:
        (await http.post("/v1/completions", json={"prompt": "Hello"})).raise_for_status()
        for port in ports:
            with cpu_time_each(f"{port.name}, idle: the hub", "ray::MetricsHub", IDLE_SCRAPES):
                found = await port.scrape(IDLE_SCRAPES)
            print(f"{port.name}, idle, ms: {summary(found)}")
        with crowded(api):
            await asyncio.sleep(WARM_UP)
            await overload(ports, seconds)
        before = [port.series for port in ports]
        await attack(http, hostile)
        for port, series in zip(ports, before, strict=True):
            await port.scrape(1)
            more = len(port.series - series)
            print(f"{port.name}: {len(series)} series, {more} more after {hostile} requests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=30, help="seconds of overload")
    parser.add_argument("--hostile", type=int, default=10_000, help="number of invalid requests")
    options = parser.parse_args()
    (port,) = free_ports(1)
    flags = ("--metrics-port", port, "--max-decoding-batch", SLOTS, "--max-waiting-requests")
    with served(*map(str, flags), str(WAITING)) as url:
        hub = f"http://127.0.0.1:{port}"
        asyncio.run(measure(url, hub, options.seconds, options.hostile))


if __name__ == "__main__":
    main()
