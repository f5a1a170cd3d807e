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
    ended: list[Timeline] | None = None,
) -> list[Timeline]:
    """Sends every job when it is due and reads its stream; errors are recorded, never raised.

    With ``max_concurrency`` a job that is due waits until fewer run; its time starts when it is
    sent, as in vLLM's benchmark. Timelines of jobs that end are added to ``ended`` as they do, for
    a caller that is interrupted.
    """
    semaphore = asyncio.Semaphore(max_concurrency or len(jobs) or 1)
    start = time.perf_counter()

    async def run(job: Job) -> Timeline:
        await asyncio.sleep(start + job.arrival - time.perf_counter())
        async with semaphore:
            timeline = await _run_job(client, _body(model, job) | (sampling or {}), job)
        if ended is not None:
            ended.append(timeline)
        return timeline

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


class OpenLoop:
    """Sends jobs to a server, for code that is not asynchronous.

    Attributes:
        ended: timelines of the last run's jobs that have ended, for one that was interrupted.
    """

    def __init__(
        self, connection: dict[str, Any], model: str, max_concurrency: int | None = None
    ) -> None:
        self.ended: list[Timeline] = []
        self._connection = connection
        self._model = model
        self._max_concurrency = max_concurrency

    def run(self, jobs: Sequence[Job]) -> list[Timeline]:
        """Returns a timeline for each job, in their order."""
        self.ended = []
        return asyncio.run(self._run(jobs))

    async def _run(self, jobs: Sequence[Job]) -> list[Timeline]:
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(**self._connection, limits=unlimited) as client:
            return await run_jobs(
                client,
                self._model,
                jobs,
                max_concurrency=self._max_concurrency,
                ended=self.ended,
            )
