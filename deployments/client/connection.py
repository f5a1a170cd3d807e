"""One process' connection to one scheduler actor: requests out, one message per step back."""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorDiedError, RayError

from rayfin.actors.errors import EngineLost, EngineUnavailable
from rayfin.actors.messages import (
    Command,
    EngineInfo,
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    TokenDelta,
    TokenDeltas,
    TokenLog,
)
from rayfin.actors.scheduler.subscriptions import MESSAGES_PER_CALL
from rayfin.actors.timing import (
    CLIENT_ANSWER_SECONDS,
    CLIENT_COMMAND_SECONDS,
    CLIENT_STUCK_SECONDS,
    ENGINE_SILENT_SECONDS,
    HEARTBEAT_SECONDS,
    RECONNECT_SECONDS,
    SILENCE_TICK_SECONDS,
)
from rayfin.deployments.client.deltas import split_deltas
from rayfin.deployments.client.lease_renewal import Renewal
from rayfin.deployments.client.routing import Candidate

logger = logging.getLogger(__name__)

News = asyncio.Queue[TokenDelta | Exception]


class EngineConnection:
    """Connects to ``scheduler``, and again whenever the connection is lost, until it is closed.

    Each connection has a client name of its own, and streams end with their connection: what an
    engine that was given up still says, and what it still holds for the old name, is nobody's. No
    Serve handle, no call per token.

    Args:
        clients: client names, none of which was used before.
        changed: called after every change of ``ready``.
        identity: of the engine (``EngineArgs.identity``): one of another is not connected to. None:
            any will do.
    """

    def __init__(
        self,
        clients: Iterator[str],
        name: str,
        scheduler: Any,
        changed: Callable[[], None],
        identity: str | None = None,
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.info: EngineInfo | None = None  # of the last connection
        self.stats = EngineStats()  # of the last heartbeat
        self.connected = False
        self.foreign = False  # it gives other tokens than those who ask here want
        self._clients = clients
        self._client = ""
        self._group = ""  # of the scheduler's, that the client's news come from
        self._changed = changed
        self._identity = identity
        self._suspect = False  # it has refused to work, and no heartbeat came since
        self._heard = False
        self._refusal = ""  # of the last attempts to connect
        self._streams: dict[int, News] = {}
        self._request_ids: dict[int, str] = {}
        self._sent: list[int] = []  # prompt lengths, since the last heartbeat
        self._outgoing: dict[int, EngineRequest] = {}
        self._aborts: list[int] = []
        self._stopped: list[int] = []  # by a stop string
        self._flush_planned = False
        self._turned = 0.0  # when the event loop was last seen to turn
        self._renewal: Renewal | None = None
        # Ray cancels the calls that a cancelled request has made. What is sent belongs to all
        # requests, the abort of a cancelled one included: it is sent in a context that is nobody's.
        self._context = contextvars.copy_context()
        self._task = asyncio.create_task(self._run())

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        stats = self.stats
        return self.connected and not (self._suspect or stats.draining or stats.asleep)

    @property
    def asleep(self) -> bool:
        """Whether an operator has put the engine to sleep."""
        return self.connected and self.stats.asleep

    def candidate(self) -> Candidate:
        stats, sent = self.stats, self._sent
        own = Candidate(
            self.name, stats.running, stats.waiting, stats.waiting_tokens, len(sent), sum(sent)
        )
        if (info := self.info) is None:
            return own
        return replace(own, page_size=info.page_size, num_pages=info.num_pages)

    def open(self, request: EngineRequest) -> News:
        """Sends the request; its deltas come in, or the error that ends it.

        Requests of one event loop turn travel in one call. ``EngineLost`` ends it with the
        connection.
        """
        news: News = asyncio.Queue()
        self._streams[request.key] = news
        self._request_ids[request.key] = request.request_id
        self._sent.append(len(request.prompt))
        self._outgoing[request.key] = replace(request, client=self._client)
        self._plan_flush()
        return news

    def drop(self, key: int, *, stopped: bool = False) -> None:
        """Nobody listens any more; a request that has not ended is aborted, or ``stopped``."""
        if key not in self._streams:
            return
        self._forget(key)
        if self._outgoing.pop(key, None) is None:
            (self._stopped if stopped else self._aborts).append(key)
            self._plan_flush()

    async def manage(self, command: Command) -> EngineStats:
        """The counters after the command.

        Raises:
            EngineUnavailable: it was not carried out, or nobody knows.
        """
        try:
            async with asyncio.timeout(CLIENT_COMMAND_SECONDS):
                self.stats = await self.scheduler.manage.remote(command)
        except (RayError, TimeoutError) as error:
            logger.warning("engine %s did not do %s: %s", self.name, command, error)
            raise EngineUnavailable(f"engine {self.name}: {type(error).__name__}") from error
        self._changed()
        return self.stats

    async def fresh_stats(self, seconds: float = CLIENT_ANSWER_SECONDS) -> EngineStats:
        """The engine's counters now, or as of its last heartbeat if it takes long to answer."""
        if self.connected:
            try:
                async with asyncio.timeout(seconds):
                    stats: EngineStats = await self.scheduler.stats.remote()
                    return stats
            except (RayError, EngineUnavailable, TimeoutError):
                pass
        return self.stats

    async def recall(self, tenant: str, request_ids: Sequence[str]) -> list[TokenLog | None]:
        """See ``SchedulerActor.recall``; nothing is known where nobody answers."""
        if self.connected:
            try:
                async with asyncio.timeout(CLIENT_ANSWER_SECONDS):
                    logs: list[TokenLog | None] = await self.scheduler.recall.remote(
                        tenant, list(request_ids)
                    )
                    return logs
            except (RayError, TimeoutError) as error:
                logger.warning("engine %s recalls nothing: %s", self.name, error)
        return [None] * len(request_ids)

    async def snapshot(self) -> EngineSnapshot | None:
        """What the engine is doing; None where nobody answers."""
        if self.connected:
            try:
                async with asyncio.timeout(CLIENT_ANSWER_SECONDS):
                    snapshot: EngineSnapshot = await self.scheduler.snapshot.remote()
                    return snapshot
            except (RayError, EngineUnavailable, TimeoutError):
                pass
        return None

    def close(self) -> None:
        """Leaves the engine; what is still open is lost here and aborted there."""
        self._task.cancel()
        if self._renewal is not None:
            self._renewal.close()
        if self._client:
            self.scheduler.unsubscribe.remote(self._client)
        self._lose(EngineLost(f"engine {self.name} was left"))

    async def _run(self) -> None:
        while True:
            try:
                await self._connect()
                await self._receive()
                self.scheduler.unsubscribe.remote(self._client)  # all is read
                lost = EngineLost(f"engine {self.name} closed the connection")
            except EngineLost as error:
                self.scheduler.unsubscribe.remote(self._client)  # should it come back to life
                lost = error
            except (RayError, EngineUnavailable) as error:
                crashed = isinstance(error, ActorDiedError)
                reason = f"engine {self.name} is gone: {type(error).__name__}"
                lost = EngineLost(reason, crashed=crashed)
                if isinstance(error, EngineUnavailable) and not self.connected:
                    self._say_refused(error)
            self._lose(lost)
            await asyncio.sleep(RECONNECT_SECONDS)

    def _say_refused(self, error: EngineUnavailable) -> None:
        """Once for each reason, for a connection is tried four times a second."""
        refusal = str(getattr(error, "cause", error))  # Ray's copy has a traceback in its text
        if refusal != self._refusal:
            self._refusal = refusal
            logger.warning("engine %s does not let this client in: %s", self.name, refusal)

    async def _connect(self) -> None:
        info: EngineInfo = await self.scheduler.info.remote()
        self.foreign = self._identity not in (None, info.identity)
        if self.foreign:
            raise EngineUnavailable(f"it serves {info.identity}, not {self._identity}")
        self.info = info
        self._client = next(self._clients)
        self._group = await self.scheduler.attach.remote(self._client)
        self._refusal = ""
        self._suspect = False
        self.connected = True
        self._changed()

    async def _receive(self) -> None:
        """Reads the subscription to its end, while the lease is renewed.

        Raises:
            EngineLost: nothing came for too long. Time in which this process itself stood still
                counts as one tick.
            RayError, EngineUnavailable: the engine's own end.
        """
        reading = asyncio.create_task(self._read())
        self._turned = time.monotonic()
        self._renewal = Renewal(self._renew)
        try:
            silence = 0.0
            while not (await asyncio.wait({reading}, timeout=SILENCE_TICK_SECONDS))[0]:
                self._turned = time.monotonic()
                silence = 0.0 if self._heard else silence + SILENCE_TICK_SECONDS
                self._heard = False
                if silence >= ENGINE_SILENT_SECONDS:
                    raise EngineLost(f"engine {self.name} is silent")
            reading.result()
        finally:
            self._renewal.close()
            reading.cancel()

    def _renew(self) -> None:
        if time.monotonic() - self._turned < CLIENT_STUCK_SECONDS:
            self.scheduler.submit.remote(self._client, [], [])

    async def _read(self) -> None:
        options = {"num_returns": "streaming", "concurrency_group": self._group}
        subscribe = self.scheduler.subscribe.options(**options)
        count, again = MESSAGES_PER_CALL, False
        while count == MESSAGES_PER_CALL:
            count = 0
            async for ref in subscribe.remote(self._client, HEARTBEAT_SECONDS, again):
                count += 1
                self._dispatch(await ref)
            again = True

    def _dispatch(self, message: TokenDeltas) -> None:
        self._heard = True
        if message.stats is not None:
            self.stats, self._sent, self._suspect = message.stats, [], False
            self._changed()
        for key, delta in split_deltas(message, self._request_ids):
            news = self._streams[key]
            if delta.finish_reason is not None:
                self._forget(key)
            news.put_nowait(delta)
        for ended in message.ended:
            if ended.error is not None and (stream := self._streams.get(ended.key)) is not None:
                self._forget(ended.key)
                if isinstance(ended.error, EngineUnavailable):
                    self._suspect = True
                    self._changed()
                stream.put_nowait(ended.error)

    def _lose(self, error: EngineLost) -> None:
        if self.connected:
            logger.warning("%s, with %d streams", error, len(self._streams))
        self.connected = False
        self._outgoing, self._aborts, self._stopped, self._sent = {}, [], [], []
        for key, news in list(self._streams.items()):
            self._forget(key)
            news.put_nowait(error)
        self._changed()

    def _forget(self, key: int) -> None:
        self._streams.pop(key, None)
        self._request_ids.pop(key, None)

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush, context=self._context)

    def _flush(self) -> None:
        """One call for all that came up in this turn of the event loop."""
        self._flush_planned = False
        requests, aborts, stopped = list(self._outgoing.values()), self._aborts, self._stopped
        self._outgoing, self._aborts, self._stopped = {}, [], []
        if self.connected and (requests or aborts or stopped):
            self.scheduler.submit.remote(self._client, requests, aborts, stopped)
