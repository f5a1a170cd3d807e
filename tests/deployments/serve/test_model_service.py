"""The models with which an ingress starts, when some have failed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rayfin.actors.errors import EngineUnavailable, InvalidConfig
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


def status(message: str, ingress: dict[str, int], engines: dict[str, int]) -> SimpleNamespace:
    deployments = {
        "engine-a": SimpleNamespace(message=message, replica_states=engines),
        "ingress": SimpleNamespace(message="", replica_states=ingress),
    }
    return SimpleNamespace(applications={"app": SimpleNamespace(deployments=deployments)})


STARTS, RUNS = {"STARTING": 1}, {"RUNNING": 1, "STARTING": 1}
ERROR = "The replica failed to start:\nrayfin.actors.errors.InvalidConfig: no room\n."


@pytest.mark.parametrize(
    ("message", "ingress", "engines", "left", "failed", "absent"),
    [
        ("", STARTS, STARTS, 1, None, "is starting"),
        ("", STARTS, {}, 0, None, "is starting"),
        ("", RUNS, STARTS, 0, None, None),  # an update
        ("", STARTS, RUNS, 1, None, None),  # its service is about to be there
        (ERROR, STARTS, STARTS, 0, "has failed: no room", "has failed: no room"),
        (ERROR, RUNS, STARTS, 0, "has failed: no room", "has failed: no room"),
        (ERROR, RUNS, STARTS, 1, None, None),
        ("It failed to start: a", RUNS, {}, 0) + ("has failed: It failed to start: a",) * 2,
    ],
)
def test_what_is_said_of_a_model_without_engines(
    message: str,
    ingress: dict[str, int],
    engines: dict[str, int],
    left: int,
    failed: str | None,
    absent: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.serve, "status", lambda: status(message, ingress, engines))
    monkeypatch.setattr(module, "find_engines", lambda app, deployment: ["engine"] * left)
    assert module.why_failed("app", "engine-a") == failed
    assert module.why_absent("app", "engine-a") == absent
    assert module.why_absent("other", "engine-a") is None


@pytest.mark.parametrize("first", [True, False])
def test_a_model_whose_files_are_wrong_holds_back_no_other(
    first: bool, reasons: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But an update, which may lose what an ingress serves, and an ingress without any model."""
    monkeypatch.setattr(module, "is_first", lambda app: first)

    async def load(name: str) -> Any:
        if name.startswith("bad"):
            raise InvalidConfig(f"{name} has no tokenizer")
        return SimpleNamespace(name=name, model_names=[name])

    async def start(*names: str) -> Any:
        return await first_services(
            {
                asyncio.create_task(load(name)): SimpleNamespace(names=[name], deployment=name)
                for name in names
            }  # type: ignore[arg-type]
        )

    for names in [("bad",), ("bad-1", "bad-2")] if first else [("bad", "good")]:
        with pytest.raises(InvalidConfig, match="no tokenizer"):
            asyncio.run(start(*names))
    if first:
        served = asyncio.run(start("bad", "good"))
        assert served.absent == {"bad": "has failed: bad has no tokenizer"}
        assert served.names == ["good"]


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
        assert served.absent == {"bad": "has failed: a mistake"}

    asyncio.run(work())
