"""The engines of an application behind one ``EngineClient``: streams outlive the engines."""

import asyncio
import itertools
import logging
import random
from collections.abc import (
    AsyncGenerator,
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rayfin.actors.errors import (
    EngineAsleep,
    EngineLost,
    EnginePaused,
    EngineUnavailable,
    NotFound,
    Overloaded,
    RequestHandedBack,
)
from rayfin.actors.messages import (
    Command,
    EngineInfo,
    EngineRequest,
    TokenDelta,
    TokenLog,
)
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.metrics.snapshot import EngineSnapshot
from rayfin.actors.parts import RequestPart
from rayfin.actors.timing import (
    APPLICATION_END_SECONDS,
    ENGINE_STALL_SECONDS,
    ENGINE_STALL_STEPS,
    REGISTRY_REFRESH_SECONDS,
    REGISTRY_SEARCH_SECONDS,
    REPLAY_PAUSE_SECONDS,
)
from rayfin.deployments.client.connection import Deltas, EngineConnection
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.client.engine_names import PREFILL
from rayfin.deployments.client.moves import Moves, OpenStream
from rayfin.deployments.client.replay import Replay
from rayfin.deployments.client.routing import PrefixAware, Router
from rayfin.deployments.client.wait_for_engine import WaitingRoom

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long requests wait for an engine while there is none, in seconds."""

    newcomer: float = 25.0  # one that no engine has had yet
    stream: float = 120.0  # one that has lost its engine, or that is underway


class EngineSource:
    """Where the pool finds engines, and how it connects to them; see ``EnginePool``."""

    def __init__(
        self,
        client: str,
        find: Callable[[], Mapping[str, Any]],
        identity: str | None,
        is_over: Callable[[], bool],
    ) -> None:
        self.find = find
        self.identity = identity
        self.is_over = is_over
        self.client_names = (f"{client}.{number}" for number in itertools.count())


StreamObserver = Callable[[EngineRequest], AbstractContextManager[Callable[[TokenDelta], None]]]


@dataclass(slots=True)
class PoolEvents:
    """Functions that the pool calls; each does nothing unless it is set."""

    replayed: Callable[[str], None] = lambda reason: None  # one of REPLAY_REASONS
    transported: Callable[[float], None] = lambda seconds: None  # RequestOverheadTimer's seconds
    moved: Callable[[str, str], None] = lambda reason, result: None  # of MOVES
    limits_changed: Callable[[EngineInfo], None] = lambda limits: None  # what `info` returns now
    # Each is entered for every stream, and the function that it gives is called with every delta.
    observers: list[StreamObserver] = field(default_factory=list)

    @contextmanager
    def observing(self, request: EngineRequest) -> Iterator[Callable[[TokenDelta], None]]:
        """Enters all observers; gives a function that passes a delta to each."""
        with ExitStack() as stack:
            observers = [stack.enter_context(observer(request)) for observer in self.observers]

            def observe(delta: TokenDelta) -> None:
                for each in observers:
                    each(delta)

            yield observe


class _Labels:
    """A short label of each engine for metrics, kept while the engine is there."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}

    def get(self, name: str, present: Container[str]) -> str:
        """The end of the engine's name if it has a number, else the first free number."""
        if name not in self._labels:
            self._labels = {engine: n for engine, n in self._labels.items() if engine in present}
            last = name.rpartition("/")[2]
            used = set(self._labels.values())
            free = next(str(n) for n in range(len(used) + 1) if str(n) not in used)
            numbered = last.removeprefix(PREFILL).isdecimal()
            self._labels[name] = last if numbered else free
        return self._labels[name]


class EnginePool:
    """The connections of one process to the engines of an application.

    A request goes to the engine that ``router`` picks, or waits in ``room`` for one. When that
    engine is lost, the request continues at the next one as prompt + tokens so far: the reader of
    its stream sees a pause and nothing else.

    Args:
        find: returns the schedulers' handles by name; called again and again, in a thread.
        identity: engines of another one get no request: while a new version takes over, engines
            of both are there. None: any engine.
        is_over: whether no engine will come any more, so that waiting requests end; called in a
            thread while there is no engine.
    """

    def __init__(
        self,
        client: str,
        find: Callable[[], Mapping[str, Any]],
        router: Router | None = None,
        patience: Patience | None = None,
        room: WaitingRoom | None = None,
        identity: str | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source = EngineSource(client, find, identity, is_over)
        self._router: Router = PrefixAware() if router is None else router
        self._patience = Patience() if patience is None else patience
        self._room = WaitingRoom() if room is None else room
        self._over = False
        self._gave_up = False  # a request waited for its time, and there is still no engine
        self._connections: dict[str, EngineConnection] = {}
        self._labels = _Labels()
        self._limits: EngineInfo | None = None
        self._streams: dict[int, OpenStream] = {}  # by key of the request: forks join it
        self._any_ready = asyncio.Event()
        self._lost_last = asyncio.Event()  # the last engine that was ready is no more
        self.events = PoolEvents()
        self._moves = Moves(
            *(self._router, self._streams, self._ready),
            lambda reason, result: self.events.moved(reason, result),
        )
        self._tasks = [
            asyncio.create_task(work) for work in (self._refresh(), self._watch_for_the_end())
        ]

    async def info(self) -> EngineInfo:
        """Limits that hold at every engine; waits a little for the first one to be ready.

        Raises:
            EngineUnavailable: there has been none.
        """
        if self._limits is None:
            with self._room.waiting():
                await self._until_ready(self._patience.newcomer)
        if self._limits is None:
            raise EngineUnavailable("no engine is ready")
        return self._limits

    async def stats(self) -> dict[str, EngineStats]:
        """The counters of the connected engines, by their labels in metrics."""
        connections = [
            connection for connection in self._connections.values() if connection.connected
        ]
        stats = await asyncio.gather(*(connection.fresh_stats() for connection in connections))
        return {
            self._label(connection.name): counters
            for connection, counters in zip(connections, stats, strict=True)
        }

    async def check_health(self) -> None:
        """See ``EngineClient.check_health``; never waits for an engine.

        Having no engine is healthy where engines are started on demand.
        """
        reason = EngineUnavailable("no engine is ready")
        for connection in self._connections.values():
            if not connection.connected:
                continue
            try:
                check_progress(connection.stats)
                return
            except EngineUnavailable as error:
                reason = error
        connected = any(connection.connected for connection in self._connections.values())
        if connected or self._gave_up or not self._room.starts_engines:
            raise reason

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """See ``EngineClient.stream``."""
        replay = Replay(request, _now())
        failures = 0  # in a row
        refused: set[str] = set()  # engines whose queues are full
        connection: EngineConnection | None = None
        key = request.key
        with self.events.observing(request) as observe:
            try:
                while True:
                    connection = await self._place(request, replay, refused)
                    attempt = replay.attempt(_now())
                    key = attempt.key
                    if connection.prefill:  # its session is at home where it goes on
                        attempt.session = None
                    stream = OpenStream(request, replay, connection, key)
                    self._streams[request.key] = stream
                    deltas, overhead = connection.open(attempt), RequestOverheadTimer(_now())
                    try:
                        while True:
                            delta = await _next(deltas)
                            begun = replay.begun
                            delta = replay.accept(delta, now := _now())
                            if (seconds := overhead.observe(delta, now)) is not None:
                                self.events.transported(seconds)
                            failures = 0
                            refused.clear()
                            observe(delta)
                            if replay.begun and not begun:  # later, each heartbeat looks again
                                self._moves.consider(stream)
                            yield delta
                            if delta.finish_reason is not None:
                                return
                    except EnginePaused:  # it takes no new requests, and has not died
                        if replay.attempts == len(refused) + 1:
                            raise
                        failures += 1
                        await self._pause(replay, failures)
                    except EngineUnavailable as error:
                        replay.lost(_now())
                        self._note_loss(request, replay, error)
                    except Overloaded:
                        refused.add(connection.name)
                        if self._ready(refused):
                            continue
                        # Queue limits apply to new requests only.
                        if replay.attempts == len(refused):
                            raise
                        refused.clear()
                        failures += 1
                        await self._pause(replay, failures)
            finally:
                self._streams.pop(request.key, None)
                if connection is not None:
                    connection.drop(key, stopped=request.satisfied)

    async def recall(self, tenant: str, request_ids: Sequence[str]) -> list[TokenLog | None]:
        """See ``EngineClient.recall``; of several logs of a request, the longest."""
        known = await asyncio.gather(
            *(connection.recall(tenant, request_ids) for connection in self._connections.values())
        )
        if not known:
            return [None] * len(request_ids)
        return [
            max(filter(None, logs), key=lambda log: len(log.tokens), default=None)
            for logs in zip(*known, strict=True)
        ]

    async def snapshots(self) -> list[EngineSnapshot]:
        """See ``EngineClient.snapshots``; in the order of the engines' names."""
        connections = [self._connections[name] for name in sorted(self._connections)]
        taken = await asyncio.gather(*(connection.snapshot() for connection in connections))
        return [snapshot for snapshot in taken if snapshot is not None]

    async def engines(self) -> list[EngineReport]:
        """See ``EngineClient.engines``; in the order of their labels."""
        return await self._report(self._native)

    async def manage(self, command: Command, engine: str | None) -> list[EngineReport]:
        """See ``EngineClient.manage``."""
        connections = [
            connection
            for connection in self._native
            if engine in (None, self._label(connection.name))
        ]
        if engine is not None and not connections:
            raise NotFound(f"There is no engine {engine[:64]!r}.", "engine")
        await asyncio.gather(*(connection.manage(command) for connection in connections))
        return await self._report(connections)

    async def prepare(self, part: RequestPart) -> None:
        """Has every engine prepare what requests with ``part`` need.

        Raises:
            InvalidRequest: the part does not fit the model.
        """
        await asyncio.gather(*(connection.prepare(part) for connection in self._native))

    async def _report(self, connections: Iterable[EngineConnection]) -> list[EngineReport]:
        labelled = sorted((self._label(connection.name), connection) for connection in connections)
        taken = await asyncio.gather(*(connection.fresh_stats() for _, connection in labelled))
        return [
            EngineReport.of(label, connection.name, stats if connection.connected else None)
            for (label, connection), stats in zip(labelled, taken, strict=True)
        ]

    def close(self) -> None:
        """See ``EngineClient.close``."""
        for work in self._tasks:
            work.cancel()
        self._moves.close()
        for connection in self._connections.values():
            connection.close()

    @property
    def _native(self) -> list[EngineConnection]:
        """Connections to engines of this identity, connected or not."""
        return [connection for connection in self._connections.values() if not connection.foreign]

    @property
    def _all_asleep(self) -> bool:
        return bool(self._native) and all(connection.asleep for connection in self._native)

    def _ready(self, refused: Iterable[str] = ()) -> list[EngineConnection]:
        return [
            connection
            for connection in self._connections.values()
            if connection.ready and connection.name not in refused
        ]

    async def _place(
        self, request: EngineRequest, replay: Replay, refused: Iterable[str]
    ) -> EngineConnection:
        """The engine to run the request; waits until one is ready.

        Raises:
            EngineAsleep: an operator has put all engines to sleep.
            Overloaded: too many requests wait.
            EngineUnavailable: no engine was ready for too long, or none will come.
            DeadlineExceeded: the request's own time is over.
        """
        waited = False
        while not (ready := self._ready(refused) or self._ready()):
            if self._over:
                raise EngineUnavailable("the server is being stopped")
            if self._all_asleep and not (replay.begun or replay.underway):  # a stream waits
                raise EngineAsleep("every engine sleeps, until an operator wakes it")
            seconds, tokens = self._seconds_left(replay), len(request.prompt)
            if not waited and not replay.attempts:
                self._room.check(tokens)
            waited = True
            with self._room.waiting(tokens):
                await self._until_ready(seconds)
        stream = self._streams.get(request.key)
        parent = None if request.parent_key is None else self._streams.get(request.parent_key)
        for home in (stream and stream.next_home, parent and parent.connection):
            if home is not None and home in ready:
                return home
        picked = self._router.pick(request, [connection.candidate() for connection in ready])
        return self._connections[picked.name]

    def _note_loss(self, request: EngineRequest, replay: Replay, error: EngineUnavailable) -> None:
        """Notes that an engine did not finish the request, for a reason outside of the request."""
        moved = isinstance(error, RequestHandedBack)
        if not moved and (not isinstance(error, EngineLost) or error.crashed):
            replay.died()
        self.events.replayed("moved" if moved else "lost")
        logger.info("request %s is sent again: %s", request.request_id, error)

    async def _pause(self, replay: Replay, failures: int) -> None:
        """Waits before a full queue is tried again."""
        first, longest = REPLAY_PAUSE_SECONDS
        seconds = min(longest, first * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
        await asyncio.sleep(min(seconds, self._seconds_left(replay)))

    def _seconds_left(self, replay: Replay) -> float:
        """How long the request may wait for an engine.

        Raises:
            EngineUnavailable: the patience for it has run out.
            DeadlineExceeded: its own deadline has passed.
        """
        now = _now()
        known = replay.attempts or replay.underway
        patience = self._patience.stream if known else self._patience.newcomer
        left = replay.waiting_since + patience - now
        own_left = replay.left(now)
        if left <= 0:
            self._gave_up = True
            raise EngineUnavailable(f"no engine has taken the request for {patience:g} s")
        return left if own_left is None else min(left, own_left)

    async def _until_ready(self, seconds: float) -> None:
        """Returns when an engine is ready, or after so many seconds."""
        if not self._ready():
            self._any_ready.clear()  # also set where all engines sleep: wait for the next change
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # wait_for may lose a cancellation (3.11)
                await self._any_ready.wait()

    async def _refresh(self) -> None:
        while True:
            try:
                schedulers = await asyncio.to_thread(self._source.find)
            except Exception as error:  # any error of Ray's: the registry is away
                logger.warning("cannot look for engines: %s", error)
            else:
                self._update_connections(schedulers)
            self._lost_last.clear()
            searching = not self._any_ready.is_set() and not self._room.is_quiet
            if searching:
                await asyncio.sleep(REGISTRY_SEARCH_SECONDS)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(REGISTRY_REFRESH_SECONDS):
                    await self._lost_last.wait()

    async def _watch_for_the_end(self) -> None:
        """A separate task: Serve may take long to answer, and ``_refresh`` goes on meanwhile."""
        while True:
            await asyncio.sleep(APPLICATION_END_SECONDS)
            if self._connections or self._room.is_quiet:
                self._over = False
                continue
            try:
                self._over = await asyncio.to_thread(self._source.is_over)
            except Exception as error:  # any error of Ray's or Serve's
                logger.warning("cannot ask Serve whether an engine will come: %s", error)
            self._changed()

    def _update_connections(self, schedulers: Mapping[str, Any]) -> None:
        for name, connection in list(self._connections.items()):
            gone = name not in schedulers and not connection.connected
            if gone or (name in schedulers and connection.scheduler != schedulers[name]):
                del self._connections[name]
                connection.close()
        for name, scheduler in schedulers.items():
            if name not in self._connections:
                self._connections[name] = EngineConnection(
                    self._source.client_names, name, scheduler, self._changed, self._source.identity
                )
        self._changed()

    def _changed(self) -> None:
        """A connection became ready, or stopped being so."""
        ready = self._ready()
        infos = [connection.info for connection in ready if connection.info is not None]
        if infos:
            self._gave_up = False
            self._limits = replace(
                infos[0],
                max_model_len=min(info.max_model_len for info in infos),
                num_pages=min(info.num_pages for info in infos),
            )
            self.events.limits_changed(self._limits)
        if infos or self._all_asleep or self._over:  # waiting requests can go on, or must end
            self._any_ready.set()
        else:
            if self._any_ready.is_set():
                self._lost_last.set()
            self._any_ready.clear()
        self._moves.look()

    def _label(self, name: str) -> str:
        return self._labels.get(name, self._connections)


async def _next(deltas: Deltas) -> TokenDelta:
    item = await deltas.get()
    if isinstance(item, Exception):
        raise item
    return item


def _now() -> float:
    return asyncio.get_running_loop().time()


def check_progress(stats: EngineStats) -> None:
    """Raises if an engine has requests and makes no progress. A busy engine that steps is healthy.

    Raises:
        EngineUnavailable: it has stalled.
    """
    patience = max(ENGINE_STALL_SECONDS, ENGINE_STALL_STEPS * stats.last_step_seconds)
    if stats.seconds_since_progress > patience:
        raise EngineUnavailable(
            f"no step finished for {stats.seconds_since_progress:.0f} s with "
            f"{stats.running + stats.waiting} requests in the engine"
        )


class RequestOverheadTimer:
    """One request at one engine; ``sent`` in seconds of the ingress' clock.

    The engine's last message has its own time to the first token. The ingress subtracts that from
    its own: the rest is the way there, the wait for the engine's loop, and the way back. As in NTP,
    durations of two clocks are compared, never times.
    """

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._first: float | None = None

    def observe(self, delta: TokenDelta, now: float) -> float | None:
        """Records a delta that arrived at ``now``; returns the seconds at the last one, or None."""
        if self._first is None and delta.tokens:
            self._first = now
        if self._first is None or delta.finish_reason is None or delta.first_token is None:
            return None
        return max(0.0, self._first - self._sent - delta.first_token)
