"""The models with which an ingress starts, when some have failed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rayfin.deployments.serve import model_service as module
from rayfin.deployments.serve.model_service import first_services


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Why deployments have failed, as Serve says."""
    known: dict[str, str | None] = {}
    context = SimpleNamespace(app_name="app")
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(module, "why_failed", lambda app, deployment: known.get(deployment))
    monkeypatch.setattr(module, "HANDOVER_POLL_SECONDS", 0.01)
    return known


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
        assert served.failed == {"late": "late has no room", "bad": "bad has no room"}
        ready["late"].set()
        ready["bad"].set()
        await asyncio.wait(loading)
        await asyncio.sleep(0)
        assert served.names == ["first", "late"]
        assert served.failed == {"bad": "bad has no room"}

    asyncio.run(work())
