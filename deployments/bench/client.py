"""Sends jobs to a server over the OpenAI API, each at its time of arrival, and times the tokens."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx

from rayfin.actors.errors import ServerError
from rayfin.deployments.bench.endpoint import stream_pieces
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
    """Sends every job when it is due and reads its stream; errors are recorded, never raised.

    With ``max_concurrency`` a job that is due waits until fewer run; its time starts when it is
    sent, as in vLLM's benchmark.
    """
    semaphore = asyncio.Semaphore(max_concurrency or len(jobs) or 1)
    start = time.perf_counter()

    async def run(job: Job) -> Timeline:
        await asyncio.sleep(start + job.arrival - time.perf_counter())
        async with semaphore:
            return await _run_job(client, _body(model, job) | (sampling or {}), job)

    return await asyncio.gather(*(run(job) for job in jobs))


async def _run_job(client: httpx.AsyncClient, body: dict[str, Any], job: Job) -> Timeline:
    timeline = Timeline(time.perf_counter(), len(job.prompt))
    try:
        async for piece in stream_pieces(client, "/completions", body):
            timeline.record(piece)
    except ServerError as error:
        timeline.error = str(error)
    timeline.expect(job.output_tokens)
    return timeline


def _body(model: str, job: Job) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(job.prompt),
        "max_tokens": job.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        # text may lag behind its tokens, so each event counts them
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
