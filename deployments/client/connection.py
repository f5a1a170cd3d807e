"""A connection of one process to one scheduler actor: requests out, one message per step back."""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from ray.exceptions import ActorDiedError, RayError

from rayfin.actors.errors import (
    EngineLost,
    EnginePaused,
    EngineUnavailable,
    RequestFailed,
    RequestHandedBack,
)
from rayfin.actors.messages import (
    Command,
    EngineInfo,
    EngineRequest,
    Int32Array,
    PagesAt,
    Seat,
    TokenDelta,
    TokenDeltas,
    TokenLog,
)
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.metrics.snapshot import EngineSnapshot
from rayfin.actors.parts import RequestPart
from rayfin.actors.scheduler.subscriptions import MESSAGES_PER_CALL
from rayfin.actors.timing import (
    CLIENT_ANSWER_SECONDS,
    CLIENT_COMMAND_SECONDS,
    CLIENT_STUCK_SECONDS,
    ENGINE_SILENT_SECONDS,
    HEARTBEAT_SECONDS,
    LINK_DRAIN_SECONDS,
    LINK_WELCOME_SECONDS,
    LOOP_COMMAND_SECONDS,
    MAX_RECONNECT_SECONDS,
    PEER_READ_SECONDS,
    RECONNECT_SECONDS,
    SILENCE_TICK_SECONDS,
)
from rayfin.actors.transport.async_channel import AsyncChannel, open_channel
from rayfin.cache.prefix_index import Digests
from rayfin.deployments.client.deltas import split_deltas
from rayfin.deployments.client.engine_names import is_prefill
from rayfin.deployments.client.lease_renewal import Renewal
from rayfin.deployments.client.routing import Candidate

logger = logging.getLogger(__name__)

Deltas = asyncio.Queue[TokenDelta | Exception]
"""What one request receives: its deltas, or the error that ends it."""


class _Streams:
    """The open requests of a connection, by key."""

    def __init__(self) -> None:
        self.request_ids: dict[int, str] = {}
        self._deltas: dict[int, Deltas] = {}

    def __len__(self) -> int:
        return len(self._deltas)

    def __getitem__(self, key: int) -> Deltas:
        return self._deltas[key]

    def open(self, request: EngineRequest) -> Deltas:
        self.request_ids[request.key] = request.request_id
        deltas: Deltas = asyncio.Queue()
        self._deltas[request.key] = deltas
        return deltas

    def pop(self, key: int) -> Deltas | None:
        self.request_ids.pop(key, None)
        return self._deltas.pop(key, None)

    def fail(self, error: Exception) -> None:
        """Ends all of them."""
        for key in list(self._deltas):
            if (deltas := self.pop(key)) is not None:
                deltas.put_nowait(error)


class _Outbox:
    """Requests, aborts and stops of one event loop turn, sent to the scheduler in one call."""

    def __init__(self, send: Callable[[list[EngineRequest], list[int], list[int]], None]) -> None:
        self._send = send
        self._requests: dict[int, EngineRequest] = {}
        self._aborts: list[int] = []
        self._stopped: list[int] = []  # by a stop string
        self._planned = False
        # Ray cancels the calls that a cancelled request has made. One call carries messages of many
        # requests, the abort of a cancelled one included, so it runs in a context of no request.
        self._context = contextvars.copy_context()

    def add(self, request: EngineRequest) -> None:
        self._requests[request.key] = request
        self._plan()

    def drop(self, key: int, *, stopped: bool) -> None:
        """Aborts a request, or says that a stop string ended it; one not yet sent is removed."""
        if self._requests.pop(key, None) is None:
            (self._stopped if stopped else self._aborts).append(key)
            self._plan()

    def clear(self) -> None:
        self._requests, self._aborts, self._stopped = {}, [], []

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._flush, context=self._context)

    def _flush(self) -> None:
        self._planned = False
        requests, aborts, stopped = list(self._requests.values()), self._aborts, self._stopped
        self.clear()
        if requests or aborts or stopped:
            self._send(requests, aborts, stopped)


class _Silence:
    """How long a subscription has been silent, and whether this process' event loop turns."""

    def __init__(self) -> None:
        self._received = False
        self._seconds = 0.0
        self._turned = time.monotonic()

    def received(self) -> None:
        self._received = True

    def tick(self) -> bool:
        """Called every SILENCE_TICK_SECONDS; True once the engine has been silent for too long.

        Time in which this process itself stood still counts as one tick.
        """
        self._turned = time.monotonic()
        self._seconds = 0.0 if self._received else self._seconds + SILENCE_TICK_SECONDS
        self._received = False
        return self._seconds >= ENGINE_SILENT_SECONDS

    @property
    def loop_is_stuck(self) -> bool:
        return time.monotonic() - self._turned >= CLIENT_STUCK_SECONDS


class _Attachment:
    """What holds while the engine knows this client.

    Requests and tokens go by ``link`` where client and engine are on one machine, else by Ray.
    """

    def __init__(self, client: str = "", group: str = "") -> None:
        self.client = client
        self.group = group  # the concurrency group of its subscription
        self.link: AsyncChannel | None = None
        self.silence = _Silence()
        self._by_ray: set[int] = set()  # keys of requests that went by Ray beside a link

    def submit(
        self,
        scheduler: Any,
        requests: list[EngineRequest],
        aborts: list[int],
        stopped: list[int],
    ) -> None:
        """Sends them; an abort goes where its request went, so that it comes after it."""
        if self.link is None:
            scheduler.submit.remote(self.client, requests, aborts, stopped)
            return
        # Ray's object store counts references to arrays, so Ray must carry them.
        referenced = [one for one in requests if any(part.by_reference for part in one.parts)]
        self._by_ray.update(request.key for request in referenced)
        if self._by_ray:
            dropped = [[key for key in keys if key in self._by_ray] for keys in (aborts, stopped)]
            if referenced or any(dropped):
                scheduler.submit.remote(self.client, referenced, *dropped)
            requests = [request for request in requests if request.key not in self._by_ray]
            aborts, stopped = (
                [key for key in keys if key not in self._by_ray] for keys in (aborts, stopped)
            )
            self._by_ray.difference_update(*dropped)
        if not self.link.open or not (requests or aborts or stopped):
            return
        try:
            self.link.send((requests, aborts, stopped))
        except Exception:
            if not requests:
                raise
            logger.exception("%d requests of %s go by Ray", len(requests), self.client)
            self._by_ray.update(request.key for request in requests)
            scheduler.submit.remote(self.client, requests, [], [])
            if aborts or stopped:
                self.link.send(([], aborts, stopped))

    def ended(self, key: int) -> None:
        """A request has ended."""
        self._by_ray.discard(key)

    def close(self) -> None:
        if self.link is not None:
            self.link.close()


class EngineConnection:
    """Connects to ``scheduler``, and again after each loss, until it is closed.

    Each connection has a client name of its own, and streams end with their connection: output of
    an engine that was given up, and requests that it still holds for the old name, are dropped. No
    Serve handle is involved, and no call is made per token.

    Args:
        clients: fresh client names.
        changed: called after every change of ``ready``.
        identity: the ``EngineArgs.identity`` to connect to; None connects to any engine.
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
        self.held: Digests | None = None  # too
        self.state: Literal["connecting", "connected", "foreign"] = "connecting"
        self._clients = clients
        self._attached = _Attachment()
        self._changed = changed
        self._identity = identity
        self._suspect = False  # it refused a request, and no heartbeat came since
        self._refusal = ""  # of the last attempts to connect
        self._streams = _Streams()
        self._sent: list[int] = []  # prompt lengths, since the last heartbeat
        self._outbox = _Outbox(self._submit)
        self._task = asyncio.create_task(self._run())

    @property
    def connected(self) -> bool:
        return self.state == "connected"

    @property
    def foreign(self) -> bool:
        """Whether the engine has another identity than the one to connect to."""
        return self.state == "foreign"

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        stats = self.stats
        return self.connected and not (self._suspect or stats.draining or stats.asleep)

    @property
    def prefill(self) -> bool:
        """Whether it computes prompts for the others."""
        return is_prefill(self.name)

    @property
    def asleep(self) -> bool:
        """Whether an operator has put the engine to sleep."""
        return self.connected and self.stats.asleep

    def candidate(self) -> Candidate:
        """The engine's load, as the router compares it."""
        stats, sent = self.stats, self._sent
        candidate = Candidate(
            self.name, stats.running, stats.waiting, stats.waiting_tokens, len(sent), sum(sent)
        )
        if (info := self.info) is None:
            return candidate
        resident = stats.adapters.resident
        return replace(
            candidate,
            page_size=info.page_size,
            num_pages=info.num_pages,
            adapters=resident,
            sessions=stats.sessions,
            unclaimed=stats.pages_unclaimed,
            draining=stats.draining,
            held=self.held,
            prefill=self.prefill,
            prompt_seconds=stats.prompt_seconds,
            read_seconds=stats.read_seconds,
        )

    def open(self, request: EngineRequest) -> Deltas:
        """Sends the request; the queue receives its deltas, or the error that ends it.

        Requests of one event loop turn travel in one call. A lost connection ends the request with
        ``EngineLost``.
        """
        deltas = self._streams.open(request)
        self._sent.append(len(request.prompt))
        self._outbox.add(replace(request, client=self._attached.client))
        return deltas

    def drop(self, key: int, *, stopped: bool = False) -> None:
        """Stops listening; a request that has not ended is aborted, or ``stopped``."""
        if self._streams.pop(key) is not None:
            self._outbox.drop(key, stopped=stopped)

    def hand_over(self, key: int) -> None:
        """Ends a stream here as the engine would that hands it back."""
        if (deltas := self._streams.pop(key)) is not None:
            self._outbox.drop(key, stopped=False)
            deltas.put_nowait(RequestHandedBack("it goes on at another engine"))

    async def warm(
        self, tokens: Int32Array, keys: tuple[str, ...], pages_at: PagesAt
    ) -> tuple[int, float]:
        """See ``SchedulerActor.warm``; an engine that does not answer has nothing."""
        try:
            async with asyncio.timeout(2 * PEER_READ_SECONDS):
                warmed: tuple[int, float] = await self.scheduler.warm.remote(tokens, keys, pages_at)
                return warmed
        except (RayError, EngineUnavailable, TimeoutError) as error:
            logger.info("engine %s reads no pages of %s: %s", self.name, pages_at.engine, error)
        return 0, 0.0

    async def manage(self, command: Command) -> EngineStats:
        """Sends an operator's command, and returns the counters after it.

        Raises:
            EngineUnavailable: the command failed, or its answer was lost.
        """
        try:
            beyond = CLIENT_COMMAND_SECONDS - LOOP_COMMAND_SECONDS
            async with asyncio.timeout(command.seconds + beyond):
                self.stats = await self.scheduler.manage.remote(command)
        except (RayError, TimeoutError) as error:
            logger.warning("engine %s did not do %s: %s", self.name, command, error)
            raise EngineUnavailable(f"engine {self.name}: {type(error).__name__}") from error
        self._changed()
        return self.stats

    async def prepare(self, part: RequestPart) -> None:
        """Has the engine prepare what requests with ``part`` need.

        An engine that does not answer does so when such a request comes.

        Raises:
            InvalidRequest: the part does not fit the model.
        """
        if not self.connected:
            return
        try:
            async with asyncio.timeout(CLIENT_COMMAND_SECONDS):
                error: Exception | None = await self.scheduler.prepare.remote(part)
        except (RayError, TimeoutError) as lost:
            logger.warning("engine %s has not prepared %s: %s", self.name, part, lost)
            return
        if error is not None:
            raise error

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
        """See ``SchedulerActor.recall``; an engine that does not answer knows no request."""
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
        """What the engine is doing, or None if it does not answer."""
        if self.connected:
            try:
                async with asyncio.timeout(CLIENT_ANSWER_SECONDS):
                    snapshot: EngineSnapshot = await self.scheduler.snapshot.remote()
                    return snapshot
            except (RayError, EngineUnavailable, TimeoutError):
                pass
        return None

    def close(self) -> None:
        """Leaves the engine: open requests end here with ``EngineLost``, and are aborted there."""
        self._task.cancel()
        if self._attached.client:
            self.scheduler.unsubscribe.remote(self._attached.client)
        self._lose(EngineLost(f"engine {self.name} was left"))

    async def _run(self) -> None:
        pause = RECONNECT_SECONDS
        while True:
            try:
                await self._connect()
                pause = RECONNECT_SECONDS
                await self._receive()
                self.scheduler.unsubscribe.remote(self._attached.client)  # all is read
                lost = EngineLost(f"engine {self.name} closed the connection")
            except EngineLost as error:
                self.scheduler.unsubscribe.remote(self._attached.client)  # it may be frozen only
                lost = error
            except (RayError, EngineUnavailable) as error:
                crashed = isinstance(error, ActorDiedError)
                reason = f"engine {self.name} is gone: {type(error).__name__}"
                lost = EngineLost(reason, crashed=crashed)
                if isinstance(error, EngineUnavailable) and not self.connected:
                    self._log_refusal(error)
            except Exception as error:  # what the engine has sent is wrong, or this code
                logger.exception("engine %s is connected to again", self.name)
                if self._attached.client:
                    self.scheduler.unsubscribe.remote(self._attached.client)
                lost = EngineLost(f"engine {self.name}: {type(error).__name__}")
            self._lose(lost)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RECONNECT_SECONDS)

    def _log_refusal(self, error: EngineUnavailable) -> None:
        # Once for each reason: a connection is tried several times a second.
        refusal = str(getattr(error, "cause", error))  # Ray's copy has a traceback in its text
        if refusal != self._refusal:
            self._refusal = refusal
            logger.warning("engine %s refuses this client: %s", self.name, refusal)

    async def _connect(self) -> None:
        info: EngineInfo = await self.scheduler.info.remote()
        if self._identity not in (None, info.identity):
            self.state = "foreign"
            raise EngineUnavailable(f"it serves {info.identity}, not {self._identity}")
        self.info = info
        address = await self._attach()
        attached = self._attached
        try:
            if address:
                attached.link = await open_channel(
                    address, self._hear, self._doubt, LINK_WELCOME_SECONDS, attached.client
                )
        except (TimeoutError, ConnectionAbortedError):  # the name may be linked, or be so still
            logger.warning("Ray carries the messages of engine %s: no welcome", self.name)
            self.scheduler.unsubscribe.remote(attached.client)
            await self._attach()
        except OSError as error:  # the engine is on another machine, say
            logger.debug("Ray carries the messages of engine %s: %s", self.name, error)
        self._refusal = ""
        self._suspect = False
        self.state = "connected"
        self._changed()

    async def _attach(self) -> str:
        """Makes this a client of a new name; returns the address for its link."""
        client = next(self._clients)
        seat: Seat = await self.scheduler.attach.remote(client)
        self._attached = _Attachment(client, seat.group)
        return seat.address

    async def _receive(self) -> None:
        """Hears the subscription to its end, while a thread renews the lease.

        Raises:
            EngineLost: the engine was silent for too long.
            RayError, EngineUnavailable: the engine ended the subscription.
        """
        attached = self._attached
        reading = asyncio.create_task(self._read())
        renewal = Renewal(lambda: self._renew(attached))
        try:
            while not (await asyncio.wait({reading}, timeout=SILENCE_TICK_SECONDS))[0]:
                if attached.silence.tick():
                    raise EngineLost(f"engine {self.name} is silent")
            if attached.link is not None:  # Ray's end may come before what is still in the socket
                failed = reading.exception() is not None
                await attached.link.until_ended(
                    LINK_DRAIN_SECONDS if failed else ENGINE_SILENT_SECONDS
                )
            reading.result()
        finally:
            renewal.close()
            reading.cancel()

    def _renew(self, attached: _Attachment) -> None:
        """Runs in the renewal's thread; an ingress that is stuck for long loses its lease."""
        if not attached.silence.loop_is_stuck:
            self.scheduler.submit.remote(attached.client, [], [])

    async def _read(self) -> None:
        client, group = self._attached.client, self._attached.group
        subscribe = self.scheduler.subscribe.options(
            num_returns="streaming", concurrency_group=group
        )
        count, again = MESSAGES_PER_CALL, False
        while count == MESSAGES_PER_CALL:
            count = 0
            async for ref in subscribe.remote(client, HEARTBEAT_SECONDS, again):
                count += 1
                self._hear(await ref)
            again = True

    def _hear(self, message: TokenDeltas) -> None:
        """A message of the subscription has come."""
        self._attached.silence.received()
        if message.stats is not None:
            self.stats, self._sent, self._suspect = message.stats, [], False
            self.held = message.held
            self._changed()
        for key, delta in split_deltas(message, self._streams.request_ids):
            deltas = self._streams[key]
            if delta.finish_reason is not None:
                self._end(key)
            deltas.put_nowait(delta)
        for ended in message.ended:
            if ended.error is None:
                continue
            if (failed := self._end(ended.key)) is not None:
                error = ended.error
                if isinstance(error, EngineUnavailable) and not isinstance(error, EnginePaused):
                    self._doubt()
                failed.put_nowait(ended.error)

    def _end(self, key: int) -> Deltas | None:
        self._attached.ended(key)
        return self._streams.pop(key)

    def _doubt(self) -> None:
        """Sends nothing new to the engine before its next heartbeat."""
        self._suspect = True
        self._changed()

    def _lose(self, error: EngineLost) -> None:
        if self.connected:
            logger.warning("%s, with %d streams", error, len(self._streams))
            self.state = "connecting"
        self._attached.close()
        self._sent = []
        self._outbox.clear()
        self._streams.fail(error)
        self._changed()

    def _submit(self, requests: list[EngineRequest], aborts: list[int], stopped: list[int]) -> None:
        if not self.connected:
            return
        try:
            self._attached.submit(self.scheduler, requests, aborts, stopped)
        except Exception as error:
            logger.exception("engine %s does not get %d requests", self.name, len(requests))
            for request in requests:
                if (failed := self._end(request.key)) is not None:
                    failed.put_nowait(RequestFailed(f"The request cannot be sent: {error}"))
