"""What an update replaces, and in which order."""

from typing import Any

import pytest
from ray import serve

from rayfin.actors.config import EngineArgs
from rayfin.deployments import app
from rayfin.deployments.server_args import ServerArgs


def deployments(server: ServerArgs, engine: EngineArgs) -> tuple[Any, Any]:
    """The ingress', and the engines'."""
    bound: serve.Application = app.bind_app(server, engine)
    ingress: Any = bound._bound_deployment
    return ingress, ingress.init_args[3][0]._bound_deployment


@pytest.mark.parametrize(
    ("engine", "is_new"),
    [
        (EngineArgs(max_prefill_batch=8), False),
        (EngineArgs(max_model_len=64, threads=2, attention="reference"), False),
        (EngineArgs(model="org/name"), True),
        (EngineArgs(dtype="float16"), True),
        (EngineArgs(tokenizer="org/name"), True),
        (EngineArgs(max_waiting_requests=2), True),
    ],
)
def test_ingresses_stay_where_only_engines_change(engine: EngineArgs, is_new: bool) -> None:
    """Serve replaces replicas whose arguments are not equal."""
    (old_ingress, old_engine), (ingress, new) = (
        deployments(ServerArgs(), args) for args in (EngineArgs(), engine)
    )
    assert (ingress.init_args[:3] != old_ingress.init_args[:3]) is is_new
    assert new.init_args != old_engine.init_args


@pytest.mark.parametrize("room", [True, False])
def test_a_new_one_comes_before_an_old_one_goes(
    monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    monkeypatch.setattr(app, "has_room", lambda args: room)
    ingress, engine = deployments(ServerArgs(), EngineArgs())
    assert ingress._deployment_config.max_surge_percent == app.ONE_MORE
    assert engine._deployment_config.max_surge_percent == (app.ONE_MORE if room else 0)
