"""In which order an update replaces what runs."""

from typing import Any

import pytest
from ray import serve

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
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


def test_engines_that_prefill_are_a_deployment_of_their_own() -> None:
    server = ServerArgs(prefill_engines=2, max_prefill_engines=4)
    bound: Any = app.bind_app(server, EngineArgs())._bound_deployment
    (engines,), (prefill,) = (
        [own._bound_deployment for own in bound.init_args[place]] for place in (3, 7)
    )
    assert (engines.name, prefill.name) == ("engine", "engine-prefill")
    assert (engines.init_args[4], prefill.init_args[4]) == ("", "engine")
    numbers = prefill._deployment_config.autoscaling_config
    assert (numbers.min_replicas, numbers.max_replicas) == (2, 4)
    for given, reason in (
        ({"prefill_engines": -1}, "must not be negative"),
        ({"prefill_engines": 3, "max_prefill_engines": 2}, "at least 3, got 2"),
        ({"max_prefill_engines": 2}, "needs prefill_engines"),
    ):
        with pytest.raises(InvalidConfig, match=reason):
            ServerArgs(**given)
    with pytest.raises(InvalidConfig, match="needs kv_peers"):
        app.bind_app(server, EngineArgs(kv_peers=False))
