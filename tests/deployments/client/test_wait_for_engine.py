"""Requests that wait while there is no engine: they have one started, and are not too many."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from rayfin.actors.errors import EngineUnavailable, Overloaded
from rayfin.actors.messages import EngineRequest, Sampling, StopRules
from rayfin.deployments.client import wait_for_engine
from rayfin.deployments.client.pool import EnginePool, Patience
from rayfin.deployments.client.wait_for_engine import WaitingRoom

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Starts:
    """Calls that would start an engine; none is answered before ``come``."""

    def __init__(self) -> None:
        self.made = self.cancelled = 0
        self.failures: list[Exception] = []
        self.come = asyncio.Event()

    async def __call__(self) -> None:
        self.made += 1
        if self.failures:
            raise self.failures.pop()
        try:
            await self.come.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_call_for_all_who_wait(anyio_backend: str) -> None:
    starts = Starts()
    room = WaitingRoom(start=starts)
    with room.waiting(), room.waiting():
        await turns()
        assert starts.made == 1
    await turns()
    assert starts.cancelled == 1  # no request waits, so no engine is started
    with room.waiting():
        await turns()
    assert starts.made == 2


async def test_a_call_that_fails_is_made_again(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_for_engine, "WAITING_ROOM_PAUSE_SECONDS", 0.0)
    starts = Starts()
    starts.failures = [ActorDiedError()]
    room = WaitingRoom(start=starts)
    with room.waiting():
        await turns()
        assert starts.made == 2


def request(tokens: int = 3) -> EngineRequest:
    return EngineRequest("r", np.ones(tokens, np.int32), Sampling(), StopRules(9))


@pytest.fixture
async def zero(anyio_backend: str) -> AsyncIterator[tuple[EnginePool, Starts]]:
    """An ingress' client while there is no engine."""
    starts = Starts()
    room = WaitingRoom(2, 10, starts)
    client = EnginePool("edge", dict, patience=Patience(60.0), room=room)
    yield client, starts
    client.close()


async def test_what_waits_is_bounded(zero: tuple[EnginePool, Starts]) -> None:
    client, starts = zero
    first = asyncio.create_task(anext(client.stream(request(8))))
    await turns()
    with pytest.raises(Overloaded, match="max_waiting_tokens"):
        await anext(client.stream(request(3)))
    second = asyncio.create_task(anext(client.stream(request(2))))
    await turns()
    with pytest.raises(Overloaded, match="max_waiting_requests"):
        await anext(client.stream(request(1)))
    assert starts.made == 1
    for waiting in (first, second):
        waiting.cancel()
    await asyncio.wait([first, second])
    assert starts.cancelled == 1


async def test_zero_is_healthy_until_somebody_waits_in_vain(anyio_backend: str) -> None:
    client = EnginePool("edge", dict, patience=Patience(0.0), room=WaitingRoom(start=Starts()))
    await client.check_health()
    with pytest.raises(EngineUnavailable, match="no engine has taken the request for 0 s"):
        await anext(client.stream(request()))
    with pytest.raises(EngineUnavailable):
        await client.check_health()
    client.close()


async def test_elsewhere_an_engine_that_is_missing_is_a_fault(anyio_backend: str) -> None:
    client = EnginePool("edge", dict)
    with pytest.raises(EngineUnavailable):
        await client.check_health()
    client.close()


async def test_elsewhere_any_number_may_wait(anyio_backend: str) -> None:
    room = WaitingRoom(1, 10)
    with room.waiting(8):
        room.check(8)
    room = WaitingRoom(1, 10, Starts())
    with room.waiting(8), pytest.raises(Overloaded):
        room.check(8)
