"""The models with which an ingress starts, when some have failed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rayfin.actors.errors import EngineUnavailable
from rayfin.deployments.serve import model_service as module
from rayfin.deployments.serve.model_service import first_services


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Why deployments have failed, as Serve says, and whether they only start."""
    known: dict[str, str | None] = {}
    context = SimpleNamespace(app_name="app")
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(module, "why_failed", lambda app, deployment: known.get(deployment))
    for name in ("HANDOVER_POLL_SECONDS", "HANDOVER_SETTLE_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)
    return known


def status(message: str, ingress: dict[str, int]) -> SimpleNamespace:
    deployments = {
        "engine-a": SimpleNamespace(message=message, replica_states={"STARTING": 1}),
        "ingress": SimpleNamespace(message="", replica_states=ingress),
    }
    return SimpleNamespace(applications={"app": SimpleNamespace(deployments=deployments)})


@pytest.mark.parametrize(
    ("message", "ingress", "engines", "failed", "absent"),
    [
        ("", {"STARTING": 1}, [], None, "is starting"),
        ("", {"RUNNING": 1, "STARTING": 1}, [], None, None),
        ("", {"STARTING": 1}, ["engine"], None, None),
        ("The replica failed to start:\nrayfin.actors.errors.InvalidConfig: no room\n.", {}, [])
        + ("has failed: no room",) * 2,
        ("The replica failed to start: a mistake", {"RUNNING": 1}, [])
        + ("has failed: The replica failed to start: a mistake",) * 2,
        ("The replica failed to start", {"STARTING": 1}, ["engine"], None, None),
    ],
)
def test_what_is_said_of_a_model_without_engines(
    message: str,
    ingress: dict[str, int],
    engines: list[str],
    failed: str | None,
    absent: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.serve, "status", lambda: status(message, ingress))
    monkeypatch.setattr(module, "find_engines", lambda app, deployment: engines)
    assert module.why_failed("app", "engine-a") == failed
    assert module.why_absent("app", "engine-a") == absent
    assert module.why_absent("other", "engine-a") is None


def test_the_first_ingress_waits_for_one_model_alone(
    reasons: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default model is not there yet: no other one answers in its place."""
    monkeypatch.setattr(module, "why_absent", lambda app, deployment: "is starting")

    async def load(name: str, ready: asyncio.Event) -> Any:
        await ready.wait()
        return SimpleNamespace(name=name, model_names=[name, f"{name}-too"])

    async def work() -> None:
        ready = {name: asyncio.Event() for name in ("slow", "quick")}
        loading: Any = {
            asyncio.create_task(load(name, event)): SimpleNamespace(
                names=[name, f"{name}-too"], deployment=name
            )
            for name, event in ready.items()
        }
        starting = asyncio.create_task(first_services(loading, early=True))
        await asyncio.sleep(0.05)
        assert not starting.done()
        ready["quick"].set()
        served = await starting
        assert served.named("quick").name == "quick"
        for name in (None, "slow"):
            with pytest.raises(EngineUnavailable, match="the model `slow` is starting"):
                served.named(name)
        reasons["slow"] = "has failed: no room"
        while "no room" not in served.absent["slow"]:
            await asyncio.sleep(0.01)
        ready["slow"].set()
        while served.absent:
            await asyncio.sleep(0.01)
        assert served.names == ["slow", "slow-too", "quick", "quick-too"]
        assert served.named(None).name == "slow"

    asyncio.run(work())


def test_an_ingress_starts_without_failed_models_which_join(
    reasons: dict[str, str | None],
) -> None:
    async def load(name: str, ready: asyncio.Event) -> Any:
        await ready.wait()
        if name == "bad":
            raise RuntimeError("a mistake")
        return SimpleNamespace(name=name, model_names=[name])

    async def work() -> None:
        ready = {name: asyncio.Event() for name in ("first", "late", "bad")}
        loading: Any = {
            asyncio.create_task(load(name, event)): SimpleNamespace(names=[name], deployment=name)
            for name, event in ready.items()
        }
        starting = asyncio.create_task(first_services(loading))
        reasons.update({name: f"{name} has no room" for name in ready})
        await asyncio.sleep(0.05)
        assert not starting.done()  # all have failed: there is nothing to serve
        reasons["late"] = None
        ready["first"].set()
        await asyncio.sleep(0.05)
        assert not starting.done()  # one may still come
        reasons["late"] = "late has no room"
        served = await starting
        assert served.names == ["first"]
        assert served.absent == {"late": "late has no room", "bad": "bad has no room"}
        ready["late"].set()
        ready["bad"].set()
        await asyncio.wait(loading)
        await asyncio.sleep(0)
        assert served.names == ["first", "late"]
        assert served.absent == {"bad": "bad has no room"}

    asyncio.run(work())
