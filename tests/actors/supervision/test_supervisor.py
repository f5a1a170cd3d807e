"""A supervisor that replaces its scheduler, or has none: what it does meanwhile."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from rayfin.actors.config import EngineArgs
from rayfin.actors.supervision import adoption, supervisor
from rayfin.actors.supervision.supervisor import Supervisor

NAME = "app/engine/0"


class Runner:
    """The handle of a runner; counts its pings."""

    def __init__(self) -> None:
        self.pings = 0
        self.ping = self

    def remote(self) -> None:
        self.pings += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """One whose scheduler has died, without Ray."""
    monkeypatch.setattr(supervisor, "RUNNER_PING_SECONDS", 0.01)
    own = Supervisor(EngineArgs(model="m", device="cpu"), NAME, detached=True)
    monkeypatch.setattr(own, "_end_scheduler", lambda: None)
    monkeypatch.setattr(own, "_create_scheduler", object)
    return own


def test_runners_are_kept_until_their_next_scheduler_has_come(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes, and also when Ray does not answer for a moment."""
    runner, failures = Runner(), [GetTimeoutError("the registry is away")]

    def find(name: str) -> Runner | None:
        if failures:
            raise failures.pop()
        return runner if name == f"{NAME}/runner/0" else None

    async def launch() -> None:
        while runner.pings < 3:
            await asyncio.sleep(0.01)

    async def repair() -> None:
        await asyncio.wait_for(engine._repair("planted"), 60)
        pings = runner.pings
        await asyncio.sleep(0.1)
        assert runner.pings == pings, "it still pings runners that have a scheduler"

    monkeypatch.setattr(supervisor, "find_actor", find)
    monkeypatch.setattr(engine, "_launch", launch)
    asyncio.run(repair())
    assert engine._generation == 1 and not failures


def test_the_log_says_what_an_engine_waits_for(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "ROOM_SECONDS", 0.01)
    monkeypatch.setattr(supervisor.ray, "cluster_resources", lambda: {"CPU": 1.0})
    engine._args = EngineArgs(model="m", device="cuda")

    async def start() -> None:
        room = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(engine._wait_for_room(SimpleNamespace(ready=lambda: room)))
        while not caplog.records:
            await asyncio.sleep(0.01)
        room.set_result(None)
        await waiting

    asyncio.run(start())
    assert f"engine {NAME} waits for room" in caplog.text and "no node has GPU" in caplog.text


def test_nobody_pings_after_a_repair_that_failed(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner()

    async def launch() -> None:
        while not runner.pings:
            await asyncio.sleep(0.01)
        raise RuntimeError("planted")

    async def repair() -> None:
        with pytest.raises(RuntimeError, match="planted"):
            await asyncio.wait_for(engine._repair("planted"), 60)
        pings = runner.pings
        await asyncio.sleep(0.1)
        assert runner.pings == pings

    monkeypatch.setattr(supervisor, "find_actor", lambda name: runner)
    monkeypatch.setattr(engine, "_launch", launch)
    asyncio.run(repair())


def test_a_supervisor_that_still_waits_for_an_engine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's last calls may come while the replica's constructor waits for an engine."""

    async def claim(*_: Any) -> None:
        await asyncio.Event().wait()

    async def leave() -> None:
        own = Supervisor(EngineArgs(model="m", device="cpu"), "app/engine/", detached=True)
        starting = asyncio.create_task(own.start())
        await asyncio.sleep(0)
        own.check()
        assert not await own.is_replaced()
        await own.drain(60)
        own.stop()
        starting.cancel()

    monkeypatch.setattr(supervisor, "claim_engine", claim)
    monkeypatch.setattr(adoption, "engine_names", lambda prefix: [])
    asyncio.run(leave())
