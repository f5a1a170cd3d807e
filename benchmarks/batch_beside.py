"""What a batch costs interactive streams: their times alone, and beside a batch that never ends.

    python benchmarks/batch_beside.py --minutes 4 --mode idle

Five streams a minute come to a server of the demo model, or of ``--model``. p99 is that of all
streams' first tokens, and of all gaps between two tokens.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from typing import Any

import httpx
import numpy as np
from server import served

ENDPOINT = "/v1/chat/completions"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.5, help="of each of the two parts")
    parser.add_argument("--streams", type=float, default=5, help="a minute")
    parser.add_argument("--tokens", type=int, default=100, help="of a stream")
    parser.add_argument("--mode", choices=("idle", "share"), default="idle")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lines", type=int, default=20_000, help="of the batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--batch-dir", folder, "--batch-mode", options.mode, "--served-model-name", "m"]
        with served(options.model, *flags) as url:
            return asyncio.run(compare(url, options))


async def compare(url: str, options: argparse.Namespace) -> int:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        await stream(http, options.tokens, 0)  # the first request is slower
        alone = await measured(http, options)
        batch = await submit(http, options.lines)
        while await answered(http, batch) < 8:
            await asyncio.sleep(0.2)
        before, began = await answered(http, batch), time.monotonic()
        beside = await measured(http, options)
        lines = (await answered(http, batch) - before) / (time.monotonic() - began)
        await http.post(f"/v1/batches/{batch}/cancel")
    for name, one, other in zip(("TTFT", "ITL"), alone, beside, strict=True):
        low, high = (float(np.percentile(own, 99)) * 1e3 for own in (one, other))
        middle = [float(np.median(own)) * 1e3 for own in (one, other)]
        print(
            f"{name:4} p99 {low:7.1f} ms alone, {high:7.1f} ms beside: {high / low:.2f} x; "
            f"median {middle[0]:.1f}, {middle[1]:.1f} ms"
        )
    print(f"the batch: {lines:.1f} lines/s meanwhile")
    return 0


async def measured(
    http: httpx.AsyncClient, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Seconds to first tokens, and between tokens, of streams at a steady rate."""
    count = max(1, round(options.streams * options.minutes))
    pause = 60 / options.streams
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(stream(http, options.tokens, number)))
        await asyncio.sleep(pause)
    found = await asyncio.gather(*tasks)
    return [first for first, _ in found], [gap for _, gaps in found for gap in gaps]


async def stream(http: httpx.AsyncClient, tokens: int, number: int) -> tuple[float, list[float]]:
    """Seconds to the first token of one stream, and between its tokens."""
    body = {**question(number), "max_tokens": tokens, "ignore_eos": True, "stream": True}
    began, times = time.monotonic(), []
    async with http.stream("POST", ENDPOINT, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"]:
                times.append(time.monotonic())
    return times[0] - began, [b - a for a, b in zip(times, times[1:], strict=False)]


def question(number: int) -> dict[str, Any]:
    content = f"What is {number % 90} + {number * 7 % 90}?"
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


async def submit(http: httpx.AsyncClient, lines: int) -> str:
    """Starts the batch and returns its id."""
    text = "".join(
        json.dumps(
            {
                **{"custom_id": f"r{number}", "method": "POST", "url": ENDPOINT},
                "body": {**question(number), "max_tokens": 64, "ignore_eos": True},
            }
        )
        + "\n"
        for number in range(lines)
    )
    files, data = {"file": ("in.jsonl", text.encode())}, {"purpose": "batch"}
    file = (await http.post("/v1/files", files=files, data=data)).raise_for_status().json()
    body = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    return str((await http.post("/v1/batches", json=body)).raise_for_status().json()["id"])


async def answered(http: httpx.AsyncClient, batch: str) -> int:
    counts = (await http.get(f"/v1/batches/{batch}")).raise_for_status().json()["request_counts"]
    return int(counts["completed"])


if __name__ == "__main__":
    sys.exit(main())
