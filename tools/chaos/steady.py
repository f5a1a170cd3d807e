"""Runs a steady load without faults and measures what grows.

    rayfin serve
    python tools/chaos/steady.py http://127.0.0.1:8000 --minutes 40

Keeps streams open on a server of this machine, and measures what its processes hold: memory, file
descriptors, threads, pages and metric series. Slopes are of the second half, for caches fill in the
first. Exits with 1 if something significantly grows by more than one percent per hour (in runs of
over half an hour; shorter ones only report), or if a request fails.
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

import httpx
from growth import LONG_ENOUGH, MAX_GROWTH, Growth, held_by
from prometheus_client.parser import text_string_to_metric_families

KINDS = {
    "ingress": r"ray::ServeReplica:\w+:ingress",
    "engine": r"ray::ServeReplica:\w+:engine",
    "scheduler": "ray::SchedulerActor",
    "runner": "ray::ModelRunnerActor",
    "hub": "ray::MetricsHub",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
    "raylet": r"\S*/raylet ",
    "gcs": r"\S*/gcs_server ",
    "command": r"\S*python.* serve ",  # the command that the user started
}
"""Prefixes of their command lines; a process may append its current activity."""

SAMPLE_SECONDS = 5.0
WORDS = (4, 48)
TOKENS = (16, 160)
"""Minimum and maximum number of words in a prompt, and of tokens in its answer."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--samples", help="file for the measurements, as JSON lines")
    options = parser.parse_args()
    samples = int(60 * options.minutes / SAMPLE_SECONDS)
    with open(options.samples or os.devnull, "w") as file:
        return asyncio.run(steady(options.url, samples, options.streams, options.seed, file))


async def steady(url: str, samples: int, streams: int, seed: int, file: TextIO) -> int:
    """Runs the load and prints a line for each quantity."""
    growth, pids = Growth(skip=samples // 2 * SAMPLE_SECONDS), of_server(urlsplit(url).port or 80)
    asks = bodies(seed)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        before = await counted(http)
        clients = [asyncio.create_task(client(http, asks)) for _ in range(streams)]
        for _ in range(samples):
            await asyncio.wait(clients, timeout=SAMPLE_SECONDS, return_when="FIRST_COMPLETED")
            for failed in (one for one in clients if one.done()):
                failed.result()
            at, values = time.monotonic(), await measured(http, pids)
            growth.add(at, values)
            print(json.dumps({"at": at, "values": values}), file=file, flush=True)
        after = await counted(http)
        for one in clients:
            one.cancel()
        await asyncio.wait(clients)
    steps, tokens, requests = (int(now - then) for now, then in zip(after, before, strict=True))
    lines, grown = growth.lines(MAX_GROWTH)
    minutes = samples * SAMPLE_SECONDS / 60
    print(f"{minutes:g} minutes, {streams} streams: {requests:,} requests, {tokens:,} tokens,")
    print(f"{steps:,} steps; first -> last, and slopes, of the second half", *lines, sep="\n")
    return int(minutes >= LONG_ENOUGH and bool(grown))


def bodies(seed: int) -> Iterator[dict[str, object]]:
    """Yields requests without common prefixes, so that none shares pages."""
    draw = random.Random(seed)
    while True:
        words = (str(draw.getrandbits(30)) for _ in range(draw.randint(*WORDS)))
        tokens = draw.randint(*TOKENS)
        yield {"prompt": " ".join(words), "max_tokens": tokens, "ignore_eos": True, "stream": True}


async def client(http: httpx.AsyncClient, asks: Iterator[dict[str, object]]) -> None:
    """Streams one answer after another.

    Raises:
        httpx.HTTPError: a request failed.
    """
    for ask in asks:
        async with http.stream("POST", "/v1/completions", json=ask) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_bytes():
                pass


async def counted(http: httpx.AsyncClient) -> tuple[float, float, float]:
    """Returns (steps, tokens, requests) so far."""
    samples = await samples_of(http)
    return (
        samples["rayfin_iteration_tokens_total_count"],
        samples["rayfin_generation_tokens_total"],
        samples["rayfin_request_success_total"],
    )


async def measured(http: httpx.AsyncClient, pids: dict[str, list[int]]) -> dict[str, float]:
    """Returns what the server holds now, by kind of process."""
    figures = {
        f"{kind} {name}": value for kind in pids for name, value in held_by(pids[kind]).items()
    }
    samples = await samples_of(http)
    figures["pages held"] = samples["rayfin_kv_cache_pages_by_state/held"]
    figures["pages cached"] = samples["rayfin_kv_cache_pages_by_state/cached"]
    figures["metric series"] = samples["series"]
    return figures


async def samples_of(http: httpx.AsyncClient) -> dict[str, float]:
    """Values of /metrics by name (pages by name/state), summed, and the number of series."""
    samples = {"series": 0.0}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            state = sample.labels.get("state")
            name = f"{sample.name}/{state}" if state else sample.name
            samples[name] = samples.get(name, 0.0) + sample.value
            samples["series"] += 1
    return samples


def of_server(port: int) -> dict[str, list[int]]:
    """Process ids of the server on a port of this machine, by kind."""
    parent_of = dict(parents())
    raylet = parent_of[listener(port, parent_of)]
    start = parent_of[raylet]  # the process that started Ray; 1: it has ended
    pids: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for pid, parent in parent_of.items():
        if raylet in (pid, parent) or start in (pid, parent) and start != 1:
            name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            for kind in [kind for kind, pattern in KINDS.items() if re.match(pattern, name)][:1]:
                pids[kind].append(pid)
    return pids


def parents() -> Iterator[tuple[int, int]]:
    """Yields (process, parent) for all processes of this machine."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            yield int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])


def listener(port: int, pids: Iterable[int]) -> int:
    """Returns the process that listens on a port.

    Raises:
        ProcessLookupError: no process does.
    """
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [
        row for row in rows if int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A"
    ]
    sockets = {f"socket:[{row[9]}]" for row in listening}
    for pid in pids:
        with suppress(OSError):  # it has ended, or its file has
            if any(os.readlink(file) in sockets for file in Path(f"/proc/{pid}/fd").iterdir()):
                return pid
    raise ProcessLookupError(f"no process listens on port {port} of this machine")


if __name__ == "__main__":
    sys.exit(main())
