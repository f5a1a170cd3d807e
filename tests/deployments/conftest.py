"""A small OpenAI server on a real socket, and schedulers without Ray on runners without a model."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from fake_server import FakeServer
from fake_stream import Stream
from rayfin.actors.errors import EngineUnavailable, RayfinError, RequestHandedBack
from rayfin.actors.messages import (
    Command,
    Ended,
    EngineInfo,
    EngineRequest,
    Int32Array,
    PagesAt,
    Seat,
    TokenDeltas,
    TokenLog,
)
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.page_tier import request_to_warm

VOCABULARY = 50


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    with FakeServer().running() as server:
        yield server


class Method:
    """``method.remote(...)``, and ``method.options(...).remote(...)``."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call

    def options(self, **options: Any) -> "Method":
        return self


METHODS = (
    *("attach", "info", "manage", "recall", "stats", "submit", "subscribe", "unsubscribe", "warm"),
)


class Scheduler:
    """A SchedulerActor without Ray: an engine that steps as the event loop turns."""

    def __init__(self, engine: Engine, others: Mapping[str, "Scheduler"]) -> None:
        self.engine = engine
        self.executor: Any = engine._pipeline._executor
        self._others = others
        self.alive = True
        self.frozen = False  # no step, no heartbeat, and calls wait
        self.draining = False
        self.identity = ""
        self.refusal: RayfinError | None = None  # of every newcomer
        self.taken: list[EngineRequest] = []
        self.seconds_to_compute = 9.0  # what it lacks of a stream that it warms
        self.steps_left = -1  # then it stands still; it still beats
        self._mail: list[Callable[[], None]] = []
        self._readers: dict[str, asyncio.Queue[TokenDeltas | None]] = {}
        for name in METHODS:
            setattr(self, name, Method(getattr(self, f"_{name}")))
        self._task = asyncio.create_task(self._run())

    def die(self) -> None:
        self.alive = False
        self._task.cancel()
        for messages in self._readers.values():
            messages.put_nowait(None)

    def hand_back(self) -> None:
        """A drain: whatever runs ends as moved."""
        self.draining = True
        for request in list(self.engine.lifecycle.state.live.values()):
            self.engine._endings.end(request, "error", error=RequestHandedBack("the engine drains"))
        self._post(self.engine._outbox.drain(0, 0))

    def fail(self) -> None:
        """Its runners cannot be replaced: all requests end, and so does every subscription."""
        self.alive = False
        self._task.cancel()
        for client, messages in self._readers.items():
            keys = [key for owner, key in self.engine.lifecycle.state.live if owner == client]
            error = EngineUnavailable("the engine cannot go on")
            ended = [Ended(key, "error", error=error) for key in keys]
            messages.put_nowait(TokenDeltas.only(*ended))

    async def _run(self) -> None:
        try:
            await self._steps()
        except Exception:
            self.die()  # rather than to leave the test waiting
            raise

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self.frozen:
                continue
            mail, self._mail = self._mail, []
            for read in mail:
                read()
            if self.steps_left:
                self.steps_left -= self.engine.has_work
                self._post(self.engine.step())

    def _post(self, messages: dict[str, TokenDeltas]) -> None:
        for client, message in messages.items():
            if client in self._readers:
                self._readers[client].put_nowait(message)

    async def _info(self) -> EngineInfo:
        await self._awake()
        config = self.engine.config
        limits = (config.max_model_len, VOCABULARY, config.num_pages, 4)
        return EngineInfo("fake", *limits, identity=self.identity)

    async def _attach(self, client: str) -> Seat:
        await self._awake()
        return Seat(f"group of {client}")

    async def _stats(self) -> EngineStats:
        await self._awake()
        stats = self.engine.stats()
        stats.draining |= self.draining
        return stats

    async def _recall(self, tenant: str, request_ids: list[str]) -> list[TokenLog | None]:
        await self._awake()
        return self.engine.recall(tenant, request_ids)

    async def _manage(self, command: Command) -> EngineStats:
        await self._awake()
        self.engine.carry_out(command)
        return self.engine.stats()

    def _submit(
        self, client: str, requests: list[EngineRequest], aborts: list[int], stopped: Any = ()
    ) -> None:
        def read() -> None:
            for key in [*aborts, *stopped]:
                self.engine.abort(client, key)
            for request in requests:
                self._add(request)

        self._mail.append(read)

    def _add(self, request: EngineRequest) -> None:
        try:
            if self.refusal is not None:
                raise self.refusal
            self.engine.add(request)
            self.taken.append(request)
            if request.beams is not None:  # the fake model must know what is searched for
                self.executor.streams[request.sampling.seed] = Stream(request, VOCABULARY)
        except RayfinError as error:
            refusal = TokenDeltas.only(Ended(request.key, "error", error=error))
            self._post({request.client: refusal})

    async def _warm(
        self, tokens: Int32Array, keys: tuple[str, ...], pages_at: PagesAt
    ) -> tuple[int, float]:
        await self._awake()
        if (source := self._others.get(pages_at.engine)) is not None:
            source.executor.share_pages("others")
            self.executor.peers[pages_at.engine] = source.executor.peers["others"]
        arrived: asyncio.Future[int] = asyncio.Future()
        request = request_to_warm(tokens, keys, pages_at, self.engine.config.page_size)
        self.engine.lifecycle.tier.warm(request, arrived.set_result)
        while not arrived.done():
            self.executor.clock += 0.001
            await asyncio.sleep(0)
        return arrived.result(), self.seconds_to_compute

    def _unsubscribe(self, client: str) -> None:
        def leave() -> None:
            self.engine.abort_client(client)
            if (messages := self._readers.pop(client, None)) is not None:
                messages.put_nowait(None)

        self._mail.append(leave)

    async def _subscribe(
        self, client: str, heartbeat: float, again: bool = False
    ) -> AsyncIterator[Awaitable[TokenDeltas]]:
        messages = self._readers[client] = asyncio.Queue()
        while self.alive or not messages.empty():
            message: TokenDeltas | None = None
            try:
                async with asyncio.timeout(heartbeat):
                    message = await messages.get()
                    if message is None:
                        break
            except TimeoutError:
                if self.frozen:
                    continue
                message = TokenDeltas.only()
                message.stats = await self._stats()
                index = self.engine.lifecycle.state.tables.index
                message.held = None if index is None else index.digests(1000)
            future: asyncio.Future[TokenDeltas] = asyncio.Future()
            future.set_result(message)
            yield future
        if not self.alive:
            raise ActorDiedError()

    async def _awake(self) -> None:
        if not self.alive:
            raise ActorDiedError()
        while self.frozen:
            await asyncio.sleep(0.001)


class World:
    """The engines of an application, and what its registry says."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self.registered: dict[str, Scheduler] = {}
        self.all: list[Scheduler] = []

    def start(self, name: str, **settings: Any) -> Scheduler:
        config = {"vocab_size": VOCABULARY, "max_model_len": 128, **settings}
        scheduler = Scheduler(self._make(**config).engine, self.registered)
        self.registered[name] = scheduler
        self.all.append(scheduler)
        return scheduler

    def kill(self, name: str) -> None:
        self.registered.pop(name).die()


@pytest.fixture
async def world(simulate: ModuleType, anyio_backend: str) -> AsyncIterator[World]:
    world = World(simulate.make_harness)
    yield world
    for scheduler in world.all:
        scheduler.die()
