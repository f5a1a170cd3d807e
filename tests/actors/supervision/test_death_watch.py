"""A death watch: one call that fails when an actor dies."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rayfin.actors.supervision import supervisor
from rayfin.actors.supervision.supervisor import DeathWatch

LONG = 60.0  # seconds; only a failure waits so long
SHORT = 0.02


class Actor:
    """The handle of an actor that dies, or loses a call, when the test says so."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[None]] = []
        self.wait_for_end = self

    def remote(self) -> Awaitable[None]:
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]

    def fail(self, error: Exception) -> None:
        self.calls[-1].set_exception(error)

    async def called(self, times: int) -> None:
        while len(self.calls) < times:
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PULSE_SECONDS", 0.0)


async def is_over(waiting: Awaitable[Any]) -> bool:
    """Whether a wait ends before a failure would."""
    await asyncio.wait_for(waiting, LONG / 2)
    return True


def test_a_death_ends_the_wait_at_once_and_every_later_one() -> None:
    async def watch() -> None:
        watch, actor = DeathWatch(), Actor()
        waiting = asyncio.create_task(watch.wait(actor, LONG))
        await actor.called(1)
        assert not waiting.done()
        actor.fail(ActorDiedError())
        assert await is_over(waiting)
        assert await is_over(watch.wait(actor, LONG))
        assert len(actor.calls) == 1

    asyncio.run(watch())


def test_an_actor_that_lives_gets_one_call_however_often_it_is_waited_for() -> None:
    async def watch() -> None:
        watch, actor = DeathWatch(), Actor()
        for _ in range(3):
            await watch.wait(actor, SHORT)
        assert len(actor.calls) == 1

    asyncio.run(watch())


def test_a_lost_call_is_no_death() -> None:
    async def watch() -> None:
        watch, actor = DeathWatch(), Actor()
        waiting = asyncio.create_task(watch.wait(actor, LONG))
        for call in range(1, 4):
            await actor.called(call)
            actor.fail(ActorUnavailableError("its node does not answer", None))
        await actor.called(4)
        assert not waiting.done()
        actor.fail(ActorDiedError())
        assert await is_over(waiting)

    asyncio.run(watch())


def test_the_next_actor_is_watched_in_place_of_the_dead_one() -> None:
    async def watch() -> None:
        watch, dead, heir = DeathWatch(), Actor(), Actor()
        waiting = asyncio.create_task(watch.wait(dead, LONG))
        await dead.called(1)
        dead.fail(ActorDiedError())
        await waiting
        waiting = asyncio.create_task(watch.wait(heir, LONG))
        await heir.called(1)
        assert not waiting.done()
        watch.close()
        await asyncio.sleep(0)
        assert heir.calls[0].cancelled()
        assert await is_over(waiting)

    asyncio.run(watch())
