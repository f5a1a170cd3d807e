"""Requests and tokens past Ray: the client's end against the engine's, over real sockets."""

import asyncio
import itertools
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from rayfin.actors.errors import EngineUnavailable, InvalidRequest, RequestFailed
from rayfin.actors.media.part import MediaInput
from rayfin.actors.messages import (
    Ended,
    EngineInfo,
    EngineRequest,
    Sampling,
    Seat,
    StopRules,
    TokenDelta,
    TokenDeltas,
)
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.scheduler.inbox import ClientLinks, ClientMessage
from rayfin.actors.scheduler.subscriptions import Subscriptions
from rayfin.actors.transport.async_channel import AsyncChannel
from rayfin.actors.transport.channel import Acceptor, Channel
from rayfin.deployments.client import connection as engine_connection
from rayfin.deployments.client import pool as engine_pool
from rayfin.deployments.client.pool import EnginePool, Patience

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="names without files are Linux's"),
]
KEYS = itertools.count(1)
PATIENCE = 30.0  # seconds; only a failure waits so long


class Method:
    """``method.remote(...)``, and ``method.options(...).remote(...)``."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call

    def options(self, **options: Any) -> "Method":
        return self


class Scheduler:
    """A SchedulerActor without Ray or an engine: the test says what the engine would."""

    def __init__(self) -> None:
        self.subscriptions = Subscriptions()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.links = ClientLinks(self.subscriptions, self.inbox)
        self.address: str | None = None  # instead of the links'
        self.by_ray: list[tuple[list[EngineRequest], list[int], list[int]]] = []
        self.left: list[str] = []
        self.client = ""
        self.dead = asyncio.Event()
        self.ended = asyncio.Event()  # by the engine, in good order
        for name in ("info", "attach", "submit", "subscribe", "unsubscribe"):
            setattr(self, name, Method(getattr(self, f"_{name}")))

    def say(self, key: int, *tokens: int, ended: Ended | None = None) -> None:
        """A step's news of one request."""
        values = np.array(tokens, np.int32)
        keys = np.full(len(tokens), key, np.int64)
        ends = [ended] if ended is not None else []
        self.subscriptions.post({self.client: TokenDeltas(0, 0, keys, values, ends)})

    def beat(self) -> None:
        message = TokenDeltas.only()
        message.stats = EngineStats()
        self.subscriptions.post({self.client: message})

    async def heard(self) -> ClientMessage:
        """The next message that has come by a socket."""
        message = await asyncio.to_thread(self.inbox.get, timeout=PATIENCE)
        assert isinstance(message, ClientMessage)
        return message

    def die(self) -> None:
        self.subscriptions.close(self.client)  # the system closes its sockets, Ray says so later
        asyncio.get_running_loop().call_later(0.01, self.dead.set)

    async def _info(self) -> EngineInfo:
        if self.dead.is_set():
            raise ActorDiedError()
        return EngineInfo("fake", 128, 100, 10, 16)

    async def _attach(self, client: str) -> Seat:
        self.client = client
        self.subscriptions.seat(client)
        return Seat("group", self.links.address() if self.address is None else self.address)

    def _submit(self, client: str, *message: Any) -> None:
        self.by_ray.append(message)

    def _unsubscribe(self, client: str) -> None:
        self.left.append(client)

    async def _subscribe(
        self, client: str, heartbeat: float, again: bool
    ) -> AsyncIterator[Awaitable[TokenDeltas]]:
        waits = [asyncio.create_task(event.wait()) for event in (self.dead, self.ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.dead.is_set():
            raise ActorDiedError()
        return
        yield


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def address() -> str | None:
    """Where the first scheduler says that it listens; None: where it does."""
    return None


@pytest.fixture
def schedulers() -> list[Scheduler]:
    """The schedulers that can be found; the first one is."""
    return []


@pytest.fixture
async def client(
    schedulers: list[Scheduler],
    address: str | None,
    monkeypatch: pytest.MonkeyPatch,
    anyio_backend: str,
) -> AsyncIterator[EnginePool]:
    for name in ("REGISTRY_REFRESH_SECONDS", "REGISTRY_SEARCH_SECONDS"):
        monkeypatch.setattr(engine_pool, name, 0.01)
    monkeypatch.setattr(engine_connection, "RECONNECT_SECONDS", 0.01)
    silent = address is not None  # no engine sends a welcome there
    monkeypatch.setattr(engine_connection, "LINK_WELCOME_SECONDS", 0.5 if silent else PATIENCE)
    for name in ("LINK_DRAIN_SECONDS", "ENGINE_SILENT_SECONDS"):  # a socket's end is waited for
        monkeypatch.setattr(engine_connection, name, PATIENCE)
    schedulers.append(Scheduler())
    if address is not None:
        schedulers[0].address = address
    client = EnginePool(
        "edge", lambda: {"app/engine/0": schedulers[0]}, patience=Patience(PATIENCE, PATIENCE)
    )
    yield client
    client.close()


def request(images: tuple[MediaInput, ...] = ()) -> EngineRequest:
    prompt = np.array([1], np.int32)
    key = next(KEYS)
    return EngineRequest(f"r{key}", prompt, Sampling(), StopRules(9), key=key, parts=images)


async def read(
    client: EnginePool, wanted: EngineRequest, heard: list[TokenDelta] | None = None
) -> list[TokenDelta]:
    """All deltas, which are in ``heard`` as soon as they have come."""
    heard = [] if heard is None else heard
    async with asyncio.timeout(PATIENCE):
        async for delta in client.stream(wanted):
            heard.append(delta)
    return heard


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not happened():
            await asyncio.sleep(0.001)


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


async def test_requests_of_one_turn_are_one_message_and_tokens_come_back(
    client: EnginePool, schedulers: list[Scheduler]
) -> None:
    await client.info()
    (scheduler,) = schedulers
    wanted = [request() for _ in range(3)]
    reading = [asyncio.create_task(read(client, one)) for one in wanted]
    message = await scheduler.heard()
    assert [one.request_id for one in message.requests] == [one.request_id for one in wanted]
    assert message.client == scheduler.client
    for one in message.requests:
        scheduler.say(one.key, one.key)
        scheduler.say(one.key, 7, ended=Ended(one.key, "stop", 7))
    answers = await asyncio.gather(*reading)
    assert [tokens(deltas) for deltas in answers] == [[one.key, 7] for one in wanted]
    assert not scheduler.by_ray


async def test_errors_come_back(client: EnginePool, schedulers: list[Scheduler]) -> None:
    reading = asyncio.create_task(read(client, request()))
    await until(lambda: schedulers)
    (sent,) = (await schedulers[0].heard()).requests
    refused = InvalidRequest("too long", "prompt")
    schedulers[0].say(sent.key, ended=Ended(sent.key, "error", error=refused))
    with pytest.raises(InvalidRequest, match="too long"):
        await reading


async def test_a_stream_that_is_given_up_is_aborted(
    client: EnginePool, schedulers: list[Scheduler]
) -> None:
    reading = asyncio.create_task(read(client, request()))
    (sent,) = (await schedulers[0].heard()).requests
    reading.cancel()
    assert (await schedulers[0].heard()).aborts == [sent.key]


async def test_arrays_in_the_object_store_go_by_ray_and_so_does_their_abort(
    client: EnginePool, schedulers: list[Scheduler]
) -> None:
    await client.info()
    image = MediaInput(b"digest", 0, 1, arrays="a reference")
    pictured, plain = request((image,)), request()
    reading = [asyncio.create_task(read(client, one)) for one in (pictured, plain)]
    (by_link,) = (await schedulers[0].heard()).requests
    await until(lambda: schedulers[0].by_ray)
    ((by_ray, *_),) = schedulers[0].by_ray
    assert [one.request_id for one in by_ray] == [pictured.request_id]
    assert by_link.request_id == plain.request_id
    for task in reading:
        task.cancel()
    assert (await schedulers[0].heard()).aborts == [by_link.key]
    await until(lambda: len(schedulers[0].by_ray) == 2)
    assert schedulers[0].by_ray[1] == ([], [by_ray[0].key], [])


async def test_a_scheduler_that_dies_is_replaced_and_its_streams_go_on(
    client: EnginePool, schedulers: list[Scheduler]
) -> None:
    reasons: list[str] = []
    client.events.replayed = reasons.append
    heard: list[TokenDelta] = []
    reading = asyncio.create_task(read(client, request(), heard))
    first = schedulers[0] if schedulers else None
    assert first is not None
    (sent,) = (await first.heard()).requests
    first.say(sent.key, 5)
    await until(lambda: heard)
    schedulers[0] = second = Scheduler()
    first.die()
    (again,) = (await second.heard()).requests
    assert again.output == [5] and again.deaths == 0  # a token has come in between
    second.say(again.key, 6, ended=Ended(again.key, "length"))
    assert tokens(await reading) == [5, 6]
    assert reasons == ["lost"]


async def test_an_engine_that_ends_is_read_to_the_end(
    client: EnginePool, schedulers: list[Scheduler]
) -> None:
    """Ray's end may come before what is still in the socket."""
    reading = asyncio.create_task(read(client, request()))
    first = schedulers[0]
    (sent,) = (await first.heard()).requests
    client_name = first.client  # it may try another one before this test looks
    schedulers[0] = second = Scheduler()
    for token in range(5):
        first.say(sent.key, token)
    first.ended.set()
    first.say(sent.key, 5)
    first.subscriptions.close_subscriptions()
    (again,) = (await second.heard()).requests
    assert again.output == list(range(6))
    assert client_name in first.left
    second.say(again.key, 6, ended=Ended(again.key, "length"))
    assert tokens(await reading) == list(range(7))


async def test_a_link_that_breaks_takes_no_more_requests(
    client: EnginePool, schedulers: list[Scheduler]
) -> None:
    """Ray has yet to say what became of the engine."""
    await client.info()
    schedulers[0].subscriptions.close(schedulers[0].client)
    await until(lambda: not client._ready())
    reading = asyncio.create_task(read(client, request()))
    schedulers.insert(0, Scheduler())
    (sent,) = (await schedulers[0].heard()).requests
    schedulers[0].say(sent.key, 1, ended=Ended(sent.key, "length"))
    assert tokens(await reading) == [1]


class NoPickle(str):
    def __reduce__(self) -> NoReturn:
        raise TypeError("no pickle")


async def moved(client: EnginePool, schedulers: list[Scheduler], second: Scheduler) -> None:
    """The first scheduler dies, and the client goes to the second."""
    await client.info()
    first, schedulers[0] = schedulers[0], second
    first.die()
    await until(lambda: not client._ready())


def closes_at_once(connected: socket.socket) -> None:
    """An engine that does not know the client."""


def says_nothing(connected: socket.socket) -> None:
    while connected.recv(1):
        pass


@pytest.mark.parametrize(
    "address",
    [
        "",
        "rayfin-of-another-machine",
        Acceptor(closes_at_once, "closes").address(),
        Acceptor(says_nothing, "silent").address(),
    ],
    ids=["none", "elsewhere", "closed", "silent"],
)
async def test_ray_carries_what_no_socket_does(
    client: EnginePool, schedulers: list[Scheduler], address: str
) -> None:
    reading = asyncio.create_task(read(client, request()))
    await until(lambda: schedulers and schedulers[0].by_ray)
    requests, aborts, stopped = schedulers[0].by_ray[0]
    assert [one.client for one in requests] == [schedulers[0].client]
    assert not aborts and not stopped
    reading.cancel()


async def test_a_client_that_is_welcomed_late_goes_on_under_a_new_name(
    client: EnginePool, schedulers: list[Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine links the old name all the same, and then sees that client leave."""
    scheduler, given_up = Scheduler(), threading.Event()
    link = scheduler.subscriptions.link

    def link_late(name: str, channel: Channel) -> bool:
        assert given_up.wait(PATIENCE)
        return link(name, channel)

    monkeypatch.setattr(scheduler.subscriptions, "link", link_late)
    await client.info()
    monkeypatch.setattr(engine_connection, "LINK_WELCOME_SECONDS", 0.01)
    await moved(client, schedulers, scheduler)
    reading = asyncio.create_task(read(client, request()))
    await until(lambda: scheduler.by_ray)
    (sent,) = scheduler.by_ray[0][0]
    given_up.set()
    gone = await scheduler.heard()
    assert gone.leaves and [gone.client] == scheduler.left
    assert sent.client == scheduler.client != gone.client
    reading.cancel()


async def test_a_welcome_that_came_while_the_loop_stood_still_counts(
    client: EnginePool, schedulers: list[Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.info()
    monkeypatch.setattr(engine_connection, "LINK_WELCOME_SECONDS", 0.01)
    send, loop = AsyncChannel.send, asyncio.get_running_loop()

    def send_and_stand_still(link: AsyncChannel, message: Any) -> None:
        connected = link._transport.get_extra_info("socket").fileno()

        def stand_still() -> None:
            assert select.select([connected], [], [], PATIENCE)[0]
            time.sleep(0.02)

        send(link, message)
        if isinstance(message, str):  # the client's name
            loop.call_soon(stand_still)

    monkeypatch.setattr(AsyncChannel, "send", send_and_stand_still)
    await moved(client, schedulers, Scheduler())
    reading = asyncio.create_task(read(client, request()))
    (sent,) = (await schedulers[0].heard()).requests
    schedulers[0].say(sent.key, 5, ended=Ended(sent.key, "length"))
    assert tokens(await reading) == [5]
    assert not schedulers[0].left


async def test_requests_that_cannot_be_packed_go_by_ray(
    client: EnginePool, schedulers: list[Scheduler]
) -> None:
    (scheduler,) = schedulers
    first = asyncio.create_task(read(client, request()))
    (sent,) = (await scheduler.heard()).requests
    odd = request()
    odd.tenant = NoPickle()
    reading = asyncio.create_task(read(client, odd))
    first.cancel()
    assert (await scheduler.heard()).aborts == [sent.key]
    await until(lambda: scheduler.by_ray)
    ((by_ray,), aborts, stopped) = scheduler.by_ray[0]
    assert by_ray.request_id == odd.request_id and not aborts and not stopped
    reading.cancel()
    await until(lambda: len(scheduler.by_ray) == 2)
    assert scheduler.by_ray[1] == ([], [by_ray.key], [])


async def test_requests_that_cannot_be_sent_at_all_fail(
    client: EnginePool, schedulers: list[Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*message: Any) -> None:
        raise TypeError("no pickle")

    await client.info()
    monkeypatch.setattr(schedulers[0], "submit", Method(submit))
    odd, fine = request(), request()
    odd.tenant = NoPickle()
    with pytest.raises(RequestFailed, match="no pickle"):
        await read(client, odd)
    reading = asyncio.create_task(read(client, fine))
    (sent,) = (await schedulers[0].heard()).requests
    schedulers[0].say(sent.key, 5, ended=Ended(sent.key, "length"))
    assert tokens(await reading) == [5]


async def test_a_connection_that_fails_oddly_is_made_again(
    client: EnginePool, schedulers: list[Scheduler]
) -> None:
    failures = [KeyError("a bug")]

    class Odd(Scheduler):
        async def _info(self) -> EngineInfo:
            if failures:
                raise failures.pop()
            return await super()._info()

    await moved(client, schedulers, Odd())
    reading = asyncio.create_task(read(client, request()))
    (sent,) = (await schedulers[0].heard()).requests
    schedulers[0].say(sent.key, 5, ended=Ended(sent.key, "length"))
    assert tokens(await reading) == [5]
    assert not failures


async def test_what_a_dead_engine_has_written_is_read(
    client: EnginePool, schedulers: list[Scheduler]
) -> None:
    """Ray may say that it has gone before the socket is read."""
    reading = asyncio.create_task(read(client, request()))
    first = schedulers[0]
    (sent,) = (await first.heard()).requests
    ((_, connection),) = client._connections.items()
    link = connection._attached.link
    assert link is not None
    link._transport.pause_reading()
    first.say(sent.key, 5, ended=Ended(sent.key, "length"))
    first.dead.set()
    asyncio.get_running_loop().call_later(0.05, link._transport.resume_reading)
    assert tokens(await reading) == [5]


async def test_a_pool_that_closes_leaves_the_engine(
    client: EnginePool, schedulers: list[Scheduler]
) -> None:
    reading = asyncio.create_task(read(client, request()))
    await schedulers[0].heard()
    client.close()
    assert (await schedulers[0].heard()).leaves
    reading.cancel()
    with pytest.raises((asyncio.CancelledError, EngineUnavailable)):
        await reading
