"""What answers the rows of one actor: an engine of its own, a server, or an application."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rayfin.actors.runner.parallel.rank import group_size
from rayfin.actors.timing import BATCH_PATIENCE_SECONDS
from rayfin.deployments.batches.answers import LineAnswer
from rayfin.deployments.batches.lines import Line
from rayfin.deployments.batches.sender import NO_TIMEOUT, LineSender
from rayfin.deployments.rayllm.data_config import RayfinConfig, model_args
from rayfin.deployments.rayllm.rows import Row, RowReader

if TYPE_CHECKING:
    from rayfin.deployments.offline.async_llm import AsyncLLM

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
    import httpx

    if config.url is not None:
        from rayfin.deployments.bench.endpoint import client_settings

        settings = client_settings(config.url, config.api_key) | {"timeout": NO_TIMEOUT}
        settings["base_url"] = settings["base_url"].removesuffix("/v1")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(**settings, limits=limits) as client:
            yield LineSender(client, batch=batch, patience=BATCH_PATIENCE_SECONDS).send
        return
    async with await _model(config) as llm:
        patience = 0.0 if config.application is None else BATCH_PATIENCE_SECONDS
        transport = httpx.ASGITransport(await llm.asgi_app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://rayfin", timeout=NO_TIMEOUT
        ) as client:
            yield LineSender(client, batch=batch, patience=patience).send


async def _model(config: RayfinConfig) -> "AsyncLLM":
    if config.application is not None:
        from rayfin.deployments.offline.connect import connect

        try:
            return await connect(config.application, config.model, background=True)
        except ValueError:  # no such model: if there is the application, its rows say so
            return await connect(config.application, background=True)
    from rayfin.deployments.offline.async_engines import ActorModel, InlineModel
    from rayfin.deployments.offline.async_llm import AsyncLLM

    model = model_args(config)
    several = group_size(model.engine) > 1
    return AsyncLLM(ActorModel(model) if several else InlineModel(model))
