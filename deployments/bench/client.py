"""Jobs sent to a server over the OpenAI API, each at its time, and what came back when."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from rayfin.actors.errors import ServerError
from rayfin.deployments.bench.endpoint import BROKEN_OFF, describe, refusal
from rayfin.deployments.bench.measures import Timeline
from rayfin.deployments.bench.workload import Job


async def run_jobs(
    client: httpx.AsyncClient,
    model: str,
    jobs: Sequence[Job],
    *,
    max_concurrency: int | None = None,
    sampling: dict[str, Any] | None = None,
) -> list[Timeline]:
    """Sends every job when it is due and reads its stream; an error is noted, never raised.

    With ``max_concurrency`` a job that is due waits until fewer run; its time starts when it is
    sent, as in vLLM's benchmark.
    """
    gate = asyncio.Semaphore(max_concurrency or len(jobs) or 1)
    start = time.perf_counter()

    async def run(job: Job) -> Timeline:
        await asyncio.sleep(start + job.arrival - time.perf_counter())
        async with gate:
            return await run_job(client, model, job, sampling or {})

    return await asyncio.gather(*(run(job) for job in jobs))


async def run_job(
    client: httpx.AsyncClient, model: str, job: Job, sampling: dict[str, Any]
) -> Timeline:
    """One streamed completion of token ids."""
    timeline = Timeline(time.perf_counter(), len(job.prompt))
    try:
        await _read(client, _body(model, job, sampling), timeline)
    except ServerError as error:
        timeline.error = str(error)
    except httpx.HTTPError as error:
        timeline.error = describe(error)
    if timeline.error is None and timeline.tokens != job.output_tokens:
        timeline.error = f"{timeline.tokens} tokens came, of {job.output_tokens}"
    return timeline


def _body(model: str, job: Job, sampling: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(job.prompt),
        "max_tokens": job.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **sampling,
    }


async def _read(client: httpx.AsyncClient, body: dict[str, Any], timeline: Timeline) -> None:
    """Notes when tokens come; how many, the running usage says (text may lag behind)."""
    counted = 0
    async with client.stream("POST", "/completions", json=body) as response:
        if response.is_error:
            await response.aread()
            raise refusal(response)
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            now = time.perf_counter()
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            tokens = _tokens_so_far(data, counted)
            if tokens > counted:
                timeline.pieces.append((now, tokens - counted))
                counted = tokens
    raise ServerError(BROKEN_OFF)


def _tokens_so_far(data: str, counted: int) -> int:
    """Output tokens by this event; one more for a piece of text of a server that does not count."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise ServerError(str(event["error"]["message"]))
        usage = event.get("usage")
        if usage is not None:
            return int(usage["completion_tokens"])
        return counted + any(choice.get("text") for choice in event["choices"])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ServerError(f"not an event of a completion: {data[:80]}") from None
