"""The engine client against a fake scheduler actor: no Ray."""

import asyncio
import contextvars
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from rayfin.actors.errors import (
    ContextLengthExceeded,
    EnginePaused,
    EngineUnavailable,
    RequestHandedBack,
)
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
from rayfin.actors.timing import HEARTBEAT_SECONDS
from rayfin.deployments.client import connection as engine_link
from rayfin.deployments.client import pool as ray_client
from rayfin.deployments.client.lease_renewal import Renewal
from rayfin.deployments.client.pool import EnginePool, Patience

pytestmark = pytest.mark.anyio
INFO = EngineInfo("fake", 128, 100, 10, 16)
Calls = list[tuple[list[EngineRequest], list[int], list[int]]]
KEYS = itertools.count(7)
PATIENCE = 30.0  # seconds; only a failure waits so long
CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("CALLER", default="no request")


class Method:
    """``method.remote(...)``, and ``method.options(...).remote(...)``."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call

    def options(self, **options: Any) -> "Method":
        assert options.pop("concurrency_group").startswith("seat of edge.")
        assert options == {"num_returns": "streaming"}
        return self


class FakeScheduler:
    def __init__(self) -> None:
        self.calls: Calls = []
        self.callers: list[str] = []
        self.current = EngineStats()
        self.dead = False
        self.full = False
        self.messages: asyncio.Queue[TokenDeltas | None] = asyncio.Queue()
        self.left: list[str] = []
        self.subscriptions: list[bool] = []  # whether each goes on with one before
        self.info = Method(self._info)
        self.attach = Method(self._attach)
        self.stats = Method(self._stats)
        self.submit = Method(self._submit)
        self.subscribe = Method(self._subscribe)
        self.unsubscribe = Method(self.left.append)

    @property
    def requests(self) -> list[EngineRequest]:
        return [request for requests, *_ in self.calls for request in requests]

    @property
    def aborts(self) -> list[int]:
        return [key for _, aborts, _ in self.calls for key in aborts]

    @property
    def stopped(self) -> list[int]:
        return [key for *_, stopped in self.calls for key in stopped]

    def die(self) -> None:
        self.dead = True
        self.messages.put_nowait(None)

    def beat(self) -> None:
        """A heartbeat with the current counters."""
        message = TokenDeltas.only()
        message.stats = self.current
        self.messages.put_nowait(message)

    def say(self, *tokens: tuple[int, int], ended: tuple[Ended, ...] = ()) -> None:
        """One step's news: (key, token) pairs, and what ended."""
        keys = np.array([key for key, _ in tokens], np.int64)
        values = np.array([token for _, token in tokens], np.int32)
        self.messages.put_nowait(TokenDeltas(0, 0, keys, values, list(ended)))

    async def _info(self) -> EngineInfo:
        self._check()
        return INFO

    async def _attach(self, client: str) -> Seat:
        self._check()
        if self.full:
            raise EngineUnavailable("the engine is full")
        return Seat(f"seat of {client}")

    async def _stats(self) -> EngineStats:
        self._check()
        return self.current

    def _submit(
        self,
        client: str,
        requests: list[EngineRequest],
        aborts: list[int],
        stopped: list[int] | None = None,
    ) -> None:
        assert client.startswith("edge.")
        self.calls.append((requests, aborts, stopped or []))
        self.callers.append(CALLER.get())

    async def _subscribe(
        self, client: str, heartbeat: float, again: bool
    ) -> AsyncIterator[Awaitable[TokenDeltas]]:
        assert client.startswith("edge.") and heartbeat == HEARTBEAT_SECONDS
        self.subscriptions.append(again)
        for _ in range(engine_link.MESSAGES_PER_CALL):
            if (message := await self.messages.get()) is None:
                break
            future: asyncio.Future[TokenDeltas] = asyncio.Future()
            future.set_result(message)
            yield future
        self._check()

    def _check(self) -> None:
        if self.dead:
            raise ActorDiedError()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engines() -> list[FakeScheduler]:
    """The schedulers that can be found; the first one is."""
    return [FakeScheduler()]


@pytest.fixture
async def client(
    engines: list[FakeScheduler], monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> AsyncIterator[EnginePool]:
    for name in ("REGISTRY_REFRESH_SECONDS", "REGISTRY_SEARCH_SECONDS"):
        monkeypatch.setattr(ray_client, name, 0.01)
    monkeypatch.setattr(engine_link, "RECONNECT_SECONDS", 0.01)
    client = EnginePool(
        "edge",
        lambda: {"app/engine/0": engines[0]} if engines else {},
        patience=Patience(newcomer=0.2, stream=5.0),
    )
    yield client
    client.close()


def request(name: str) -> EngineRequest:
    prompt = np.array([1], np.int32)
    return EngineRequest(name, prompt, Sampling(), StopRules(9), key=next(KEYS))


async def read(client: EnginePool, name: str) -> list[TokenDelta]:
    async with asyncio.timeout(PATIENCE):
        return [delta async for delta in client.stream(request(name))]


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not happened():
            await asyncio.sleep(0.001)


async def test_requests_of_one_turn_travel_in_one_call(
    client: EnginePool, engines: list[FakeScheduler]
) -> None:
    assert await client.info() == INFO
    reading = [asyncio.create_task(read(client, name)) for name in "abc"]
    await until(lambda: engines[0].calls)
    ((requests, aborts, _),) = engines[0].calls
    assert [one.request_id for one in requests] == ["a", "b", "c"] and not aborts
    assert len({one.key for one in requests}) == 3
    assert {one.client for one in requests} == {"edge.0"}
    a, b, c = (one.key for one in requests)
    engines[0].say((a, 10), (c, 30))
    engines[0].say((c, 31), (a, 11), (b, 20), ended=(Ended(a, "stop", 11), Ended(b, "length")))
    engines[0].say((c, 32), ended=(Ended(c, "length"),))
    answers = await asyncio.gather(*reading)
    tokens = [[token for delta in deltas for token in delta.tokens] for deltas in answers]
    assert tokens == [[10, 11], [20], [30, 31, 32]]
    assert [deltas[-1].finish_reason for deltas in answers] == ["stop", "length", "length"]
    assert answers[0][-1].stop_reason == 11
    assert [deltas[0].request_id for deltas in answers] == ["a", "b", "c"]
    assert engines[0].aborts == []


async def test_a_subscription_goes_on_in_another_call(
    client: EnginePool, engines: list[FakeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "MESSAGES_PER_CALL", 3)
    reading = asyncio.create_task(read(client, "a"))
    await until(lambda: engines[0].calls)
    key = engines[0].requests[0].key
    for token in range(7):
        engines[0].say((key, token))
    engines[0].say((key, 7), ended=(Ended(key, "length"),))
    assert [token for delta in await reading for token in delta.tokens] == list(range(8))
    assert engines[0].subscriptions == [False, True, True]
    assert not engines[0].left


async def test_stream_that_met_a_stop_string_is_stopped(
    client: EnginePool, engines: list[FakeScheduler]
) -> None:
    wanted = request("a")
    deltas = client.stream(wanted)
    first = asyncio.create_task(anext(deltas))
    await until(lambda: engines[0].calls)
    key = engines[0].requests[0].key
    engines[0].say((key, 5))
    await first
    wanted.satisfied = True
    await deltas.aclose()
    await until(lambda: engines[0].stopped)
    assert engines[0].stopped == [key] and not engines[0].aborts


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_stream_that_is_given_up_is_aborted(
    client: EnginePool, engines: list[FakeScheduler], how: str
) -> None:
    deltas = client.stream(request("a"))
    first = asyncio.create_task(anext(deltas))
    await until(lambda: engines[0].calls)
    key = engines[0].requests[0].key
    if how == "close":
        engines[0].say((key, 5))
        await first
        await deltas.aclose()
    else:
        first.cancel()
    await until(lambda: engines[0].aborts)
    assert engines[0].aborts == [key] and not engines[0].stopped
    engines[0].say((key, 6))  # late output of it is dropped
    after = asyncio.create_task(read(client, "b"))
    await until(lambda: len(engines[0].requests) == 2)
    other = engines[0].requests[1].key
    assert other != key
    engines[0].say((other, 7), ended=(Ended(other, "length"),))
    assert [delta.tokens for delta in await after] == [[7]]


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_is_never_lost(
    client: EnginePool, engines: list[FakeScheduler], turns: int
) -> None:
    """However early it comes: so many turns of the event loop after the start."""
    await client.info()
    reading = asyncio.create_task(read(client, "a"))
    for _ in range(turns):
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: engines[0].aborts == [one.key for one in engines[0].requests])


async def test_nothing_is_sent_in_the_name_of_a_request(
    client: EnginePool, engines: list[FakeScheduler]
) -> None:
    """Ray cancels what a cancelled request has called: its abort, and others' requests with it."""

    async def ask() -> None:
        CALLER.set("a request")
        await read(client, "a")

    asking = asyncio.create_task(ask())
    await until(lambda: engines[0].calls)
    asking.cancel()
    await until(lambda: engines[0].aborts)
    assert engines[0].callers == ["no request", "no request"]


async def test_refusal_is_raised_to_its_request_alone(
    client: EnginePool, engines: list[FakeScheduler]
) -> None:
    reading = [asyncio.create_task(read(client, name)) for name in "ab"]
    await until(lambda: engines[0].calls)
    a, b = (one.key for one in engines[0].requests)
    refusal = ContextLengthExceeded("too long", "prompt")
    engines[0].say(ended=(Ended(a, "error", error=refusal),))
    engines[0].say((b, 1), ended=(Ended(b, "length"),))
    with pytest.raises(ContextLengthExceeded, match="too long"):
        await reading[0]
    assert [delta.tokens for delta in await reading[1]] == [[1]]
    assert engines[0].aborts == []


@pytest.mark.parametrize("dies", [True, False])
async def test_lost_engine_is_a_pause(
    client: EnginePool, engines: list[FakeScheduler], dies: bool
) -> None:
    """It died, or closed the connection of a client that it took for gone: the next one goes on."""
    lost = engines[0]
    reading = asyncio.create_task(read(client, "a"))
    await until(lambda: lost.calls)
    first = lost.requests[0]
    lost.say((first.key, 3), (first.key, 4))
    await until(lambda: lost.messages.empty())
    if dies:
        # The registry is read every few milliseconds: a new engine there would close the connection
        # before it sees the death.
        (connection,) = client._connections.values()
        lost.die()
        await until(lambda: not connection.connected)
    engines[0] = FakeScheduler()
    if not dies:
        lost.messages.put_nowait(None)
    await until(lambda: engines[0].calls)
    (second,) = engines[0].requests
    assert second.output == [3, 4] and second.key != first.key
    assert second.deaths == int(dies)
    assert second.client != first.client
    engines[0].say((first.key, 9), (second.key, 5), ended=(Ended(second.key, "length"),))
    assert [delta.tokens for delta in await reading] == [[3, 4], [5]]
    assert engines[0].aborts == lost.aborts == []


async def test_no_engine(client: EnginePool, engines: list[FakeScheduler]) -> None:
    assert await client.info() == INFO
    lost = engines.pop()
    lost.die()
    await until(lambda: not client._connections)
    assert await client.info() == INFO  # what is asked for is checked, and then waits
    with pytest.raises(EngineUnavailable, match="no engine has taken the request for 0.2 s"):
        await read(client, "a")
    with pytest.raises(EngineUnavailable, match="no engine is ready"):
        await client.check_health()
    assert await client.stats() == {}


async def test_no_engine_for_one_that_is_underway(
    client: EnginePool, engines: list[FakeScheduler]
) -> None:
    """It waits as long as a stream that has lost its engine, and new requests end before."""
    await client.info()
    lost = engines.pop()
    lost.die()
    await until(lambda: not client._connections)
    late = request("late")
    late.underway = True
    waiting = asyncio.create_task(anext(client.stream(late)))
    with pytest.raises(EngineUnavailable, match="no engine has taken the request for 0.2 s"):
        await read(client, "a")
    engines.append(FakeScheduler())
    await until(lambda: engines[0].calls)
    ((requests, _, _),) = engines[0].calls
    assert [own.request_id for own in requests] == ["late"]
    engines[0].say((requests[0].key, 10))
    assert (await waiting).tokens == [10]


async def test_there_never_was_an_engine(anyio_backend: str) -> None:
    client = EnginePool("edge", dict, patience=Patience(newcomer=0.01))
    with pytest.raises(EngineUnavailable, match="no engine is ready"):
        await client.info()
    client.close()


async def test_health_is_progress(client: EnginePool, engines: list[FakeScheduler]) -> None:
    await client.info()
    (link,) = client._connections.values()

    async def beat(stats: EngineStats) -> None:
        engines[0].current = stats
        engines[0].beat()
        await until(lambda: link.stats is stats)

    await client.check_health()
    await beat(EngineStats(running=3, seconds_since_progress=1000.0))
    with pytest.raises(EngineUnavailable, match="no step finished for 1000 s with 3 requests"):
        await client.check_health()
    await beat(EngineStats(seconds_since_progress=1000.0, last_step_seconds=100.0))
    await client.check_health()  # its steps are that slow
    engines[0].die()
    await until(lambda: not link.connected)
    with pytest.raises(EngineUnavailable, match="no engine is ready"):
        await client.check_health()


async def test_lease_is_renewed_whatever_the_event_loop_does(
    engines: list[FakeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "Renewal", lambda renew: Renewal(renew, 0.01))
    client = EnginePool("edge", lambda: {"app/engine/0": engines[0]})
    await until(lambda: bool(engines[0].calls))
    before = len(engines[0].calls)
    (connection,) = client._connections.values()
    deadline = time.monotonic() + PATIENCE
    while len(engines[0].calls) <= before + 3:  # the event loop stands still
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert engines[0].calls[:3] == [([], [], [])] * 3
    client.close()
    await asyncio.wait([connection._task])
    calls = len(engines[0].calls)
    await asyncio.sleep(0.05)
    assert len(engines[0].calls) == calls and engines[0].left == ["edge.0"]


async def test_the_next_engine_is_looked_for_as_soon_as_the_last_one_is_lost(
    engines: list[FakeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_client, "REGISTRY_REFRESH_SECONDS", 3600.0)
    client = EnginePool("edge", lambda: {"app/engine/0": engines[0]})
    reading = asyncio.create_task(read(client, "a"))
    await until(lambda: engines[0].calls)
    await asyncio.sleep(3 * ray_client.REGISTRY_SEARCH_SECONDS)  # it searches no more
    engines.insert(0, FakeScheduler())
    engines[1].die()
    await until(lambda: engines[0].calls)
    key = engines[0].requests[0].key
    engines[0].say((key, 5), ended=(Ended(key, "length"),))
    assert [delta.tokens for delta in await reading] == [[5]]
    client.close()


async def test_refused_connection_is_told_once_and_tried_again(
    engines: list[FakeScheduler],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine_link, "RECONNECT_SECONDS", 0.01)
    engines[0].full = True
    client = EnginePool("edge", lambda: {"app/engine/0": engines[0]})
    await until(lambda: "the engine is full" in caplog.text)
    await asyncio.sleep(0.1)
    assert caplog.text.count("the engine is full") == 1
    engines[0].full = False
    await until(lambda: bool(engines[0].subscriptions))
    client.close()


async def test_event_loop_that_hangs_loses_its_lease(
    engines: list[FakeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "Renewal", lambda renew: Renewal(renew, 0.01))
    monkeypatch.setattr(engine_link, "SILENCE_TICK_SECONDS", 0.01)
    monkeypatch.setattr(engine_link, "CLIENT_STUCK_SECONDS", 0.2)
    client = EnginePool("edge", lambda: {"app/engine/0": engines[0]})
    await until(lambda: bool(engines[0].calls))
    (connection,) = client._connections.values()
    while not connection._attached.silence.loop_is_stuck:
        time.sleep(0.01)
    time.sleep(0.1)  # a call that was under way
    calls = len(engines[0].calls)
    time.sleep(0.1)
    assert len(engines[0].calls) == calls
    await until(lambda: len(engines[0].calls) > calls)  # it turns again
    client.close()


async def test_a_pause_refuses_what_is_new_and_is_no_death(
    client: EnginePool, engines: list[FakeScheduler]
) -> None:
    """One that another engine had goes on once the pause is over."""
    assert await client.info() == INFO
    paused = EnginePaused("this engine is paused for new weights")
    new = asyncio.create_task(read(client, "new"))
    await until(lambda: engines[0].requests)
    engines[0].say(ended=(Ended(engines[0].requests[0].key, "error", error=paused),))
    with pytest.raises(EnginePaused):
        await new
    moved = asyncio.create_task(read(client, "moved"))
    for count, error in enumerate((RequestHandedBack("it drains"), paused, paused), start=2):
        await until(lambda: len(engines[0].requests) == count)  # noqa: B023
        engines[0].say(ended=(Ended(engines[0].requests[-1].key, "error", error=error),))
        engines[0].beat()
    await until(lambda: len(engines[0].requests) == 5)
    last = engines[0].requests[-1]
    assert last.deaths == 0
    engines[0].say((last.key, 3), ended=(Ended(last.key, "stop"),))
    assert [delta.tokens for delta in await moved] == [[3]]
