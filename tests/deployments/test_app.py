"""In which order an update replaces what runs."""

from typing import Any

import pytest
from ray import serve

from rayfin.actors.config import EngineArgs
from rayfin.deployments import app
from rayfin.deployments.serve.server_args import ServerArgs


def deployments(server: ServerArgs, engine: EngineArgs) -> tuple[Any, Any]:
    """The ingress', and the engines'."""
    bound: serve.Application = app.bind_app(server, engine)
    ingress: Any = bound._bound_deployment
    return ingress, ingress.init_args[3][0]._bound_deployment


@pytest.mark.parametrize("room", [True, False])
def test_a_new_one_comes_before_an_old_one_goes(
    monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    monkeypatch.setattr(app, "has_room", lambda args, deployment, wanted: room)
    ingress, engine = deployments(ServerArgs(), EngineArgs())
    assert ingress._deployment_config.max_surge_percent == app.ONE_MORE
    assert engine._deployment_config.max_surge_percent == (app.ONE_MORE if room else 0)
