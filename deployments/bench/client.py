"""Sends jobs to a server over the OpenAI API, each at its time of arrival, and times the tokens."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.request import getproxies

import aiohttp
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
        transport = wire_transport()
        async with httpx.AsyncClient(
            **self._connection, limits=unlimited, transport=transport
        ) as client:
            return await run_jobs(
                client,
                self._model,
                jobs,
                max_concurrency=self._max_concurrency,
                ended=self.ended,
            )


# A transport of httpx whose answers cost little.
#
# httpx's own reads an answer in Python, a third of a millisecond for each event of a stream. A
# server on the same machine would lack that time. aiohttp parses in C.


def wire_transport() -> "WireTransport | None":
    """A transport, or None where httpx's own must do: the environment names a proxy."""
    return None if getproxies() else WireTransport()


class WireTransport(httpx.AsyncBaseTransport):
    """Sends requests by aiohttp, over connections that are used again, as many as run at once."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None  # made where an event loop runs

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises:
        httpx.ConnectError, httpx.ConnectTimeout: nothing answers there.
        httpx.ReadTimeout, httpx.RemoteProtocolError: the connection broke off.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        limits: dict[str, float | None] = request.extensions.get("timeout", {})
        named = [(name.decode(), value.decode("latin-1")) for name, value in request.headers.raw]
        headers = [pair for pair in named if pair[0].lower() != "content-length"]  # aiohttp's own
        with _errors_of_httpx():
            response = await self._session.request(
                request.method,
                str(request.url),
                headers=headers,
                data=await request.aread() or None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    sock_connect=limits.get("connect"), sock_read=limits.get("read")
                ),
            )
        stream = _Body(response)
        fields = list(response.raw_headers)
        return httpx.Response(response.status, headers=fields, stream=stream, request=request)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


class _Body(httpx.AsyncByteStream):
    """The body of one answer."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _errors_of_httpx():
            async for piece in self._response.content.iter_any():
                yield piece

    async def aclose(self) -> None:
        self._response.close()  # a connection whose answer was read is free already


@contextmanager
def _errors_of_httpx() -> Iterator[None]:
    """Raises aiohttp's errors as httpx's."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx.ConnectTimeout(str(error)) from error
    except aiohttp.ServerTimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from error
    except aiohttp.ClientConnectorError as error:
        raise httpx.ConnectError(str(error)) from error
    except aiohttp.ClientError as error:
        raise httpx.RemoteProtocolError(str(error)) from error
