"""What JSON schemas cost over HTTP: to the first token of their own requests, and to neighbours.

    python benchmarks/structured_http.py [--requests 30] [--seconds 20] [--rate 20]

The model is that of structured.py: the 135M shape with a vocabulary of 49,152 tokens.

first token: requests in turns: free, with a schema that the server has seen, with a new one.
neighbours: four streams at a time, first alone, then while requests for one token arrive at --rate
a second: free ones, then each with a hard schema that is new.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from server import served
from structured import make_model, schemas

from rayfin.deployments.bench.endpoint import stream_pieces

NEIGHBOURS = 4
NEIGHBOUR_TOKENS = 48
numbers = itertools.count()


def plain_schema() -> dict[str, Any]:
    """A small schema that no server has seen."""
    return schemas(1, seed=1000 + next(numbers))[0]


def hard_schema() -> dict[str, Any]:
    """Some 6 kB that no server has seen: nested objects, patterns, references, a union."""
    number = next(numbers)
    rng = random.Random(number)

    def an_object(depth: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            f"field_{number}_{place}": rng.choice(
                [
                    {"type": "string", "pattern": f"^[a-z]{{{place + 1},20}}-[0-9]{{2,8}}$"},
                    {"type": "string", "format": "date-time"},
                    {"enum": [f"{number} {one}" for one in range(12)]},
                    {"type": "number", "minimum": -number, "maximum": 10 * number + 7},
                    {"$ref": "#/$defs/node"},
                ]
            )
            for place in range(8)
        }
        if depth:
            fields["inner"] = an_object(depth - 1)
        return {"type": "object", "properties": fields, "required": list(fields)}

    node = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    }
    return {**an_object(4), "$defs": {"node": node}}


async def ask(
    api: httpx.AsyncClient, tokens: int, schema: dict[str, Any] | None = None
) -> list[float]:
    """The seconds of a stream's events, counted from its request."""
    body: dict[str, Any] = {
        "prompt": [random.randrange(300, 9000) for _ in range(64)],
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
    }
    if schema is None:
        body["ignore_eos"] = True
    else:
        body["structured_outputs"] = {"json": schema}
    started, times = time.perf_counter(), []
    async for _ in stream_pieces(api, "/completions", body):
        times.append(time.perf_counter() - started)
    return times


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def first_tokens(api: httpx.AsyncClient, requests: int) -> None:
    seen = plain_schema()
    kinds: dict[str, Callable[[], dict[str, Any] | None]] = {
        "free": lambda: None,
        "seen": lambda: seen,
        "new": plain_schema,
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for place in range(requests + 3):
        for name, schema in kinds.items():
            first = (await ask(api, 4, schema()))[0]
            if place >= 3:
                found[name].append(first)
    free = statistics.median(found["free"])
    print("| first token of | p50, ms | p99 | p50 over free |\n|---|---|---|---|")
    for name, values in found.items():
        p50 = statistics.median(values)
        print(
            f"| {name} | {1000 * p50:.1f} | {percentile(values, 0.99):.1f} "
            f"| {1000 * (p50 - free):+.1f} |"
        )


async def neighbours(api: httpx.AsyncClient, seconds: float) -> tuple[list[float], list[float]]:
    """(times to a first token, times between tokens) of streams that run side by side."""
    first: list[float] = []
    between: list[float] = []
    end = time.perf_counter() + seconds

    async def run() -> None:
        while time.perf_counter() < end:
            times = await ask(api, NEIGHBOUR_TOKENS)
            first.append(times[0])
            between.extend(b - a for a, b in itertools.pairwise(times))

    await asyncio.gather(*(run() for _ in range(NEIGHBOURS)))
    return first, between


async def send(
    api: httpx.AsyncClient,
    rate: float,
    schema: Callable[[], dict[str, Any]] | None,
    counts: Counter[int],
) -> None:
    """Sends requests for one token until it is cancelled; counts the answers by their status.

    Raises:
        httpx.HTTPStatusError: One failed. 429 is an answer: too many grammars wait.
    """

    async def one() -> None:
        form = {} if schema is None else {"structured_outputs": {"json": schema()}}
        body = {"prompt": "x", "max_tokens": 1, **form}
        reply = await api.post("/completions", json=body)
        if reply.status_code != 429:
            reply.raise_for_status()
        counts[reply.status_code] += 1

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(one())
            await asyncio.sleep(1 / rate)


async def disturbed(api: httpx.AsyncClient, seconds: float, rate: float) -> None:
    await neighbours(api, 3)
    print(
        "\n| neighbours, ms | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | "
        "beside them: answered | refused |\n|---|---|---|---|---|---|---|"
    )
    for name, schema in (("alone", None), ("free requests", None), ("new schemas", hard_schema)):
        counts: Counter[int] = Counter()
        sender = None if name == "alone" else asyncio.create_task(send(api, rate, schema, counts))
        measured = await neighbours(api, seconds)
        if sender is not None:
            assert not sender.done(), sender.exception()
            sender.cancel()
            await asyncio.wait([sender])
        row = [percentile(values, share) for values in measured for share in (0.5, 0.99)]
        figures = " | ".join(f"{value:.1f}" for value in row)
        print(f"| {name} | {figures} | {counts[200]} | {counts[429]} |")


async def measure(url: str, options: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"{url}/v1", timeout=120, limits=limits) as api:
        await first_tokens(api, options.requests)
        await disturbed(api, options.seconds, options.rate)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        with served(folder, "--max-model-len", "2048") as url:
            asyncio.run(measure(url, options))


if __name__ == "__main__":
    main()
