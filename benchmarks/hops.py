"""Breaks down the time of one HTTP request beside its step, with a row for each hop.

    python benchmarks/hops.py --model MODEL [--requests 30] [--prompt-tokens 128]

Starts a server and sends prompts one after another, each for one output token. All rows but the
client's are growths of the server's histograms on /metrics; mean milliseconds.
"""

import argparse
import asyncio
import time

import httpx
from server import served

from rayfin.deployments.bench.client import run_jobs
from rayfin.deployments.bench.workload import Lengths, random_jobs

PATIENCE = 60.0  # seconds until the hub has counted all requests
TTFT = "time_to_first_token_seconds"
WARM_UP = 3


def totals(metrics: str) -> dict[str, float]:
    """The values of Rayfin's series, summed over labels."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith("rayfin_"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0].removeprefix("rayfin_")
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def counted(http: httpx.AsyncClient, requests: int) -> dict[str, float]:
    """Waits until the totals count this many requests, and returns them."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = totals((await http.get("/metrics")).raise_for_status().text)
        counts = (found.get(f"{name}_count", 0) for name in (TTFT, "request_prefill_time_seconds"))
        if min(counts) >= requests:
            return found
        assert time.monotonic() < deadline, "the hub has not counted all requests"
        await asyncio.sleep(0.2)


async def measure(url: str, requests: int, prompt_tokens: int) -> None:
    jobs = random_jobs(
        WARM_UP + requests,
        Lengths.parse(str(prompt_tokens), "prompt_tokens"),
        Lengths.parse("1", "output_tokens"),
        vocabulary=400,
        seed=1,
    )
    async with (
        httpx.AsyncClient(base_url=url) as http,
        httpx.AsyncClient(base_url=f"{url}/v1", timeout=60) as api,
    ):
        model = (await api.get("/models")).raise_for_status().json()["data"][0]["id"]
        await run_jobs(api, model, jobs[:WARM_UP], max_concurrency=1)
        before = await counted(http, WARM_UP)
        lines = await run_jobs(api, model, jobs[WARM_UP:], max_concurrency=1)
        after = await counted(http, WARM_UP + requests)
    assert not any(line.error for line in lines), [line.error for line in lines]
    client = 1000 * sum(line.ttft or 0.0 for line in lines) / requests

    def each(name: str) -> float:
        return 1000 * (after[name] - before[name]) / requests

    flushed, first = each("first_flush_seconds_sum"), each(f"{TTFT}_sum")
    ingress, transport = each("ingress_time_seconds_sum"), each("request_transport_seconds_sum")
    queue, prefill = (each(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill"))
    step, to_runner = each("step_seconds_total"), each("step_transport_seconds_sum")
    rows = (
        ("client, proxy and Serve's router, both ways", client - flushed),
        ("ingress: checks and tokens", ingress),
        ("ingress to engine, and back", transport),
        ("engine: until admitted", queue),
        ("engine to runner, and back", to_runner),
        ("engine: the rest until the first token", prefill - step - to_runner),
        (
            "ingress: the rest until the first event is out",
            flushed - ingress - transport - queue - prefill,
        ),
        ("the step itself", step),
        ("all, as the client sees it", client),
    )
    print(f"{requests} prompts of {prompt_tokens} tokens and one more: ms, means")
    print("\n".join(f"{value:8.1f}  {name}" for name, value in rows))
    print(f"{first:8.1f}  of these, from the ingress' side, to the first token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    options = parser.parse_args()
    with served(options.model) as url:
        asyncio.run(measure(url, options.requests, options.prompt_tokens))


if __name__ == "__main__":
    main()
