"""An engine's client over plain Ray actor handles: batches out, one message per step back."""

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from rayfin.actors.errors import EngineUnavailable
from rayfin.actors.messages import EngineInfo, EngineRequest, EngineStats, TokenDelta, TokenDeltas
from rayfin.actors.supervisor import check_progress
from rayfin.deployments.deltas import split_deltas

logger = logging.getLogger(__name__)

RENEW_SECONDS = 4.0  # under a third of the scheduler's client lease
CONNECT_SECONDS = 10.0
RETRY_SECONDS = 0.25
STATS_SECONDS = 5.0


class RayEngineClient:
    """One process' connection to one engine.

    ``find`` returns the scheduler's handle, or None while there is none; it is asked again whenever
    the connection is lost. Requests of one event loop turn travel in one call; all tokens of a step
    come back in one message of a streaming generator. No Serve handle, no call per token.
    """

    def __init__(self, client: str, find: Callable[[], Any | None]) -> None:
        self._client = client
        self._find = find
        self._scheduler: Any = None
        self._info: EngineInfo | None = None
        self._connected = asyncio.Event()
        self._streams: dict[int, asyncio.Queue[TokenDelta | Exception]] = {}
        self._request_ids: dict[int, str] = {}
        self._outgoing: list[EngineRequest] = []
        self._aborts: list[int] = []
        self._stopped: list[int] = []  # by a stop string
        self._flush_planned = False
        # Ray cancels the calls that a cancelled request has made. What is sent belongs to all
        # requests, the abort of a cancelled one included: it is sent in a context that is nobody's.
        self._context = contextvars.copy_context()
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._keep_alive()),
        ]

    async def info(self) -> EngineInfo:
        """The engine's limits; waits a little for an engine that is about to be ready.

        Raises:
            EngineUnavailable: there is none.
        """
        try:
            async with asyncio.timeout(CONNECT_SECONDS):  # wait_for may lose a cancellation (3.11)
                await self._connected.wait()
        except TimeoutError:
            raise EngineUnavailable("no engine is ready") from None
        assert self._info is not None
        return self._info

    async def stats(self) -> EngineStats:
        """A snapshot of the engine's counters.

        Raises:
            EngineUnavailable: no engine, or one that does not answer.
        """
        if self._scheduler is None:
            raise EngineUnavailable("no engine is ready")
        try:
            stats: EngineStats = await asyncio.wait_for(
                self._scheduler.stats.remote(), STATS_SECONDS
            )
        except (RayError, TimeoutError) as error:
            raise EngineUnavailable(f"the engine does not answer: {error}") from None
        return stats

    async def check_health(self) -> None:
        """See ``EngineClient.check_health``."""
        check_progress(await self.stats())

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """See ``EngineClient.stream``."""
        await self.info()
        key = request.key
        news: asyncio.Queue[TokenDelta | Exception] = asyncio.Queue()
        self._streams[key] = news
        self._request_ids[key] = request.request_id
        self._send(replace(request, client=self._client))
        try:
            while True:
                delta = await news.get()
                if isinstance(delta, Exception):
                    raise delta
                if delta.finish_reason is not None:
                    self._forget(key)
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if key in self._streams:
                self._forget(key)
                (self._stopped if request.satisfied else self._aborts).append(key)
                self._plan_flush()

    def close(self) -> None:
        """Leaves the engine; what is still open is aborted there."""
        for task in self._tasks:
            task.cancel()
        if self._scheduler is not None:
            self._scheduler.unsubscribe.remote(self._client)

    def _send(self, request: EngineRequest) -> None:
        self._outgoing.append(request)
        self._plan_flush()

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush, context=self._context)

    def _flush(self) -> None:
        """One call for all that came up in this turn of the event loop."""
        self._flush_planned = False
        requests, aborts, stopped = self._outgoing, self._aborts, self._stopped
        self._outgoing, self._aborts, self._stopped = [], [], []
        if self._scheduler is not None:
            self._scheduler.submit.remote(self._client, requests, aborts, stopped)

    def _forget(self, key: int) -> None:
        self._streams.pop(key, None)
        self._request_ids.pop(key, None)

    async def _receive(self) -> None:
        """Connects, reads the subscription to its end, and again."""
        while True:
            try:
                await self._connect()
                stream = self._scheduler.subscribe.options(num_returns="streaming")
                async for ref in stream.remote(self._client):
                    self._dispatch(await ref)
                reason = "the engine closed the connection"
            except (RayError, EngineUnavailable) as error:
                reason = f"the engine is gone: {type(error).__name__}"
            self._disconnect(reason)
            await asyncio.sleep(RETRY_SECONDS)

    async def _connect(self) -> None:
        while (scheduler := self._find()) is None:
            await asyncio.sleep(RETRY_SECONDS)
        self._info = await scheduler.info.remote()
        self._scheduler = scheduler
        self._connected.set()

    def _disconnect(self, reason: str) -> None:
        if self._connected.is_set():
            logger.warning("client %s: %s", self._client, reason)
        self._connected.clear()
        self._scheduler = None
        for key, news in list(self._streams.items()):
            self._forget(key)
            news.put_nowait(EngineUnavailable(reason))

    def _dispatch(self, message: TokenDeltas) -> None:
        for key, delta in split_deltas(message, self._request_ids):
            if (news := self._streams.get(key)) is not None:
                news.put_nowait(delta)
        for ended in message.ended:
            if ended.error is not None and (news := self._streams.get(ended.key)) is not None:
                self._forget(ended.key)
                news.put_nowait(ended.error)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            if self._scheduler is not None:
                self._scheduler.submit.remote(self._client, [], [])
