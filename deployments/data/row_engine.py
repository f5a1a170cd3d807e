"""What answers the rows of one actor: an engine of its own, a server, or an application."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rayfin.actors.errors import EngineUnavailable
from rayfin.actors.timing import BATCH_PATIENCE_SECONDS, BATCH_PAUSE_SECONDS
from rayfin.deployments.batches.answers import LineAnswer
from rayfin.deployments.batches.lines import Line
from rayfin.deployments.batches.sender import NO_TIMEOUT, LineSender
from rayfin.deployments.data.config import RayfinConfig, model_args
from rayfin.deployments.data.rows import Row, RowReader

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

T = TypeVar("T")

Send = Callable[[Line], Awaitable[LineAnswer]]

IN_FLIGHT = 1024
"""Rows that are sent at once at most; an engine batches as many of them as it has slots."""


class RowEngine:
    """Answers rows in their order; batches of rows may overlap.

    It has an event loop and a thread of its own, so any thread or coroutine may call it.

    Raises:
        InvalidConfig: the model cannot be served here.
        ServerError: there is no such server.
    """

    def __init__(self, config: RayfinConfig) -> None:
        self._reader = RowReader(config)
        self._in_flight = asyncio.Semaphore(IN_FLIGHT)
        self._stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rows", daemon=True)
        self._thread.start()
        self._send: Send = self._wait(self._stack.enter_async_context(_connection(config)))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a row that are read."""
        return self._reader.columns

    async def answer(self, rows: Sequence[Row]) -> list[Row]:
        """The new columns of each row.

        Raises:
            ServerError: nothing answers any more.
        """
        future = asyncio.run_coroutine_threadsafe(self._answer(rows), self._loop)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Frees the model."""
        self._wait(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, rows: Sequence[Row]) -> list[Row]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(line)) for line in self._reader.lines(rows)]
        return self._reader.outputs(task.result() for task in tasks)

    async def _one(self, line: Line | LineAnswer) -> LineAnswer:
        if isinstance(line, LineAnswer):
            return line
        async with self._in_flight:
            return await self._send(line)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@asynccontextmanager
async def _connection(config: RayfinConfig) -> AsyncIterator[Send]:
    batch = str(config.seed)
    if config.application is not None:
        yield ApplicationSender(config.application, batch).send
        return
    import httpx

    if config.url is not None:
        from rayfin.deployments.bench.endpoint import client_settings

        settings = client_settings(config.url, config.api_key) | {"timeout": NO_TIMEOUT}
        settings["base_url"] = settings["base_url"].removesuffix("/v1")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(**settings, limits=limits) as client:
            yield LineSender(client, batch=batch, patience=BATCH_PATIENCE_SECONDS).send
        return
    from rayfin.deployments.offline.local_app import LocalApp

    async with LocalApp(model_args(config)) as local:
        transport = httpx.ASGITransport(local.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://rayfin", timeout=NO_TIMEOUT
        ) as client:
            yield LineSender(client, batch=batch, patience=0.0).send


class ApplicationSender:
    """Sends lines to the worker of batches of a running application.

    Args:
        batch: what seeds are made of, beside the line's custom_id.
    """

    def __init__(self, application: str, batch: str) -> None:
        from ray import serve

        self._batch = batch
        self._handle: DeploymentHandle[Any] = serve.get_deployment_handle("batches", application)

    async def send(self, line: Line) -> LineAnswer:
        """Returns the line's answer; a worker that dies is waited for.

        Raises:
            EngineUnavailable: no worker has answered for ten minutes.
        """
        from ray.exceptions import RayError

        clock = asyncio.get_running_loop().time
        began, pause = clock(), BATCH_PAUSE_SECONDS[0]
        while True:
            try:
                answer: LineAnswer = await self._handle.answer.remote(line, self._batch)
                return answer
            except RayError as error:
                if clock() - began > BATCH_PATIENCE_SECONDS:
                    raise EngineUnavailable(f"the application does not answer: {error}") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, BATCH_PAUSE_SECONDS[1])
