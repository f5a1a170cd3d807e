"""An engine that an update replaces waits for the new ingresses."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus

from rayfin.actors.timing import HANDOVER_POLL_SECONDS, HANDOVER_SETTLE_SECONDS
from rayfin.deployments.serve import engine
from rayfin.deployments.serve.engine import wait_for_new_ingresses

pytestmark = pytest.mark.anyio

UPDATING = (ApplicationStatus.DEPLOYING, "UPDATING")
REPLACED = (ApplicationStatus.DEPLOYING, "HEALTHY")  # an engine still leaves
DELETING = (ApplicationStatus.DELETING, "UPDATING")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that are made, which take no time; the clock goes on by them."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr("rayfin.deployments.serve.engine.asyncio.sleep", sleep)
    monkeypatch.setattr(
        "rayfin.deployments.serve.engine.time", SimpleNamespace(monotonic=lambda: sum(made))
    )
    return made


def say(monkeypatch: pytest.MonkeyPatch, *states: tuple[Any, Any]) -> None:
    """Serve's answers, of which the last one repeats."""
    left = list(states)

    def status() -> Any:
        app, ingress = left.pop(0) if len(left) > 1 else left[0]
        deployments = {"ingress": SimpleNamespace(status=ingress)}
        applications = {"app": SimpleNamespace(status=app, deployments=deployments)}
        return SimpleNamespace(applications=applications)

    monkeypatch.setattr("rayfin.deployments.serve.engine.serve.status", status)


async def test_until_they_are_there(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    say(monkeypatch, UPDATING, UPDATING, REPLACED)
    await wait_for_new_ingresses("app")
    polls = [HANDOVER_POLL_SECONDS] * 2
    assert pauses == [*polls, HANDOVER_SETTLE_SECONDS]


async def test_for_so_long(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    say(monkeypatch, UPDATING)
    await wait_for_new_ingresses("app", seconds=7)
    assert sum(pauses) == 7


async def test_not_when_all_ends(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    say(monkeypatch, UPDATING, DELETING)
    await wait_for_new_ingresses("app")
    assert pauses == [HANDOVER_POLL_SECONDS]
    await wait_for_new_ingresses("another")
    assert len(pauses) == 1


class Supervisor:
    """The supervisor of an engine that leaves while Ray does not answer; notes the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def is_replaced(self) -> bool:
        raise RuntimeError("planted")

    async def drain(self, seconds: float) -> None:
        self.calls.append(f"drain {seconds:.0f}")

    def stop(self) -> None:
        self.calls.append("stop")


async def test_it_drains_and_stops_where_ray_does_not_answer() -> None:
    deployment: Any = engine.EngineDeployment
    replica = SimpleNamespace(_supervisor=Supervisor(), _drain_seconds=30.0, _app="app")
    await deployment.func_or_class.__del__(replica)
    assert replica._supervisor.calls == ["drain 30", "stop"]
