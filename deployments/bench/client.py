"""Sends jobs to a server over the OpenAI API, each at its time of arrival, and times the tokens."""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.request import getproxies

import httptools
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


# HTTP/1.1 of a load generator: a transport of httpx whose answers cost little.
#
# httpx's own reads an answer in Python, a third of a millisecond for each event of a stream. A
# server on the same machine would lack that time. This one has the parser of uvicorn, in C, and one
# callback for each read.

HttpAddress = tuple[str, str, int]  # scheme, host, port


def wire_transport() -> "WireTransport | None":
    """A transport, or None where httpx's own must do: the environment names a proxy."""
    return None if getproxies() else WireTransport()


class WireTransport(httpx.AsyncBaseTransport):
    """Sends requests over connections that are kept and used again, as many as run at once."""

    def __init__(self) -> None:
        self._idle: dict[HttpAddress, list[_Connection]] = {}
        self._ssl: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises:
        httpx.ConnectError, httpx.ConnectTimeout: nothing answers there.
        httpx.ReadTimeout, httpx.RemoteProtocolError: the connection broke off.
        """
        timeouts: dict[str, float | None] = request.extensions.get("timeout", {})
        body = await request.aread()
        url = request.url
        address = (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        connection = self._reused(address) or await self._connect(address, timeouts.get("connect"))
        try:
            connection.send(_head(request) + body)
            status, headers = await connection.head(timeouts.get("read"))
        except BaseException:
            connection.close()
            raise
        stream = _Body(self, address, connection, timeouts.get("read"))
        return httpx.Response(status, headers=headers, stream=stream, request=request)

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle = {}

    def take_back(self, address: HttpAddress, connection: "_Connection") -> None:
        """The answer has been read, or is not wanted any more."""
        if connection.reusable:
            self._idle.setdefault(address, []).append(connection)
        else:
            connection.close()

    def _reused(self, address: HttpAddress) -> "_Connection | None":
        idle = self._idle.get(address, [])
        while idle:
            if (connection := idle.pop()).reusable:
                return connection
        return None

    async def _connect(self, address: HttpAddress, seconds: float | None) -> "_Connection":
        scheme, host, port = address
        if scheme == "https" and self._ssl is None:
            self._ssl = httpx.create_ssl_context()
        context = self._ssl if scheme == "https" else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                _, made = await loop.create_connection(_Connection, host, port, ssl=context)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return made


class _Connection(asyncio.Protocol):
    """One connection, on which one request at a time is answered."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: deque[bytes] = deque()
        self._has_head = self._ended = True
        self._broken: str | None = None
        self._keeps = True
        self._news = asyncio.Event()

    def send(self, data: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers = []
        self._has_head = self._ended = False
        self._transport.write(data)

    async def head(self, seconds: float | None) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Waits for the status and the headers."""
        while not self._has_head:
            await self._next(seconds)
        return self._parser.get_status_code(), self._headers

    async def piece(self, seconds: float | None) -> bytes | None:
        """The next piece of the body, None at its end."""
        while not self._pieces:
            if self._ended:
                return None
            await self._next(seconds)
        return self._pieces.popleft()

    @property
    def reusable(self) -> bool:
        return self._ended and self._keeps and self._broken is None and not self._pieces

    def close(self) -> None:
        self._transport.close()

    async def _next(self, seconds: float | None) -> None:
        if self._broken is not None:
            raise httpx.RemoteProtocolError(self._broken)
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError as error:
            raise httpx.ReadTimeout("nothing was answered") from error

    # What asyncio calls

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._broken = str(error)
            self._transport.close()
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._broken = self._broken or "the server closed the connection"
        names = {name.lower() for name, _ in self._headers}
        if self._has_head and not names & {b"content-length", b"transfer-encoding"}:
            self._ended = True
        self._news.set()

    # What the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._keeps = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._ended = self._has_head


class _Body(httpx.AsyncByteStream):
    """The body of one answer."""

    def __init__(
        self,
        transport: WireTransport,
        address: HttpAddress,
        connection: _Connection,
        seconds: float | None,
    ) -> None:
        self._transport = transport
        self._address = address
        self._connection = connection
        self._seconds = seconds
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._connection.piece(self._seconds)) is not None:
            yield piece

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self._transport.take_back(self._address, self._connection)


def _head(request: httpx.Request) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s" % pair for pair in request.headers.raw]
    return b"\r\n".join([*lines, b"", b""])
