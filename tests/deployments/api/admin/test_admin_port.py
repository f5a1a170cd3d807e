"""The operators' own port: its routes, its key, and that the API has none of them then."""

import socket
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.messages import Command
from rayfin.deployments.api.admin import Operated
from rayfin.deployments.api.app import build_api
from rayfin.deployments.app import AppArgs, bind_app, build_app, edge_settings
from rayfin.deployments.cli import engines
from rayfin.deployments.cli.main import main
from rayfin.deployments.edge.listen_options import PLAIN
from rayfin.deployments.http.body_limits import MAX_URL
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.paths import ADMIN_PATHS
from rayfin.deployments.serve.admin_port import bind, build_admin_api
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.ports import check_ports
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.deployments.serve.startup import summary

ADMIN = ServerArgs(api_key="client-key", admin_api_key="admin-key", admin_port=9401)
OPERATOR = {"Authorization": "Bearer admin-key"}


@pytest.fixture
def door(engine: Any) -> TestClient:
    keys = ADMIN.admin_keys()
    assert keys is not None
    return TestClient(build_admin_api([Operated(["m"], engine)], keys))


def test_it_has_the_routes_of_operators_alone(door: TestClient, engine: Any) -> None:
    app: Any = door.app
    assert set(app.openapi()["paths"]) == ADMIN_PATHS
    for path in ("/v1/models", "/metrics", "/health", "/docs", "/openapi.json", "/ui", "/"):
        assert door.get(path, headers=OPERATOR).status_code == 404, path
    assert door.post("/admin/drain?engine=1", headers=OPERATOR).status_code == 200
    assert engine.commands == [(Command.DRAIN, "1")]


def test_it_is_closed_without_its_key(door: TestClient, engine: Any) -> None:
    for headers in ({}, {"Authorization": "Bearer client-key"}, {"X-Api-Key": "admin-key"}):
        for path in ADMIN_PATHS:
            answer = door.request("POST", path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert engine.commands == []


def test_it_has_the_limits_of_the_edge(door: TestClient) -> None:
    assert door.get("/admin/engines?" + "x" * MAX_URL, headers=OPERATOR).status_code == 414
    assert door.get("/admin/engines", headers=OPERATOR).headers["x-request-id"]


def test_the_api_has_none_of_them_then(service: Any, engine: Any) -> None:
    service.edge = edge_settings(ADMIN)
    with TestClient(build_api(service)) as http:
        for headers, status in ((OPERATOR, 401), ({"Authorization": "Bearer client-key"}, 404)):
            commands = {
                http.request("POST", path, headers=headers).status_code for path in ADMIN_PATHS
            }
            assert commands == {status}
    assert engine.commands == []


def test_commands_find_it(
    door: TestClient, engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[str] = []

    def connect(base_url: str, headers: dict[str, str], timeout: Any) -> httpx.Client:
        asked.append(base_url)
        return TestClient(door.app, base_url, headers=headers)

    monkeypatch.setattr(engines.httpx, "Client", connect)
    monkeypatch.setenv("RAYFIN_ADMIN_API_KEY", "admin-key")
    assert main(["wake", "--admin-url", "127.0.0.1:9401"]) == 0
    monkeypatch.setenv("RAYFIN_ADMIN_URL", "http://127.0.0.1:9402/")
    assert main(["sleep", "--engine", "0"]) == 0
    assert asked == ["http://127.0.0.1:9401/", "http://127.0.0.1:9402/"]
    assert engine.commands == [(Command.WAKE, None), (Command.SLEEP, "0")]


def test_it_is_deployed_with_the_digests_of_its_keys() -> None:
    args = AppArgs(admin_port=9401, admin_host="0.0.0.0", admin_api_key="canary-key")
    server, _, edge, _, _, admin, *_ = build_app(args)._bound_deployment.init_args
    host, port, keys, clients, models = admin._bound_deployment.init_args
    ((names, deployment, settings, engine),) = models
    assert engine.model == "demo" and clients is None
    assert (names, deployment, settings["model"]) == (["demo"], "engine", "demo")
    assert "canary-key" not in str(settings)
    assert (host, port) == ("0.0.0.0", 9401) and keys.tenant("Bearer canary-key") is not None
    assert edge.admin_keys is None and "canary" not in repr((server, edge, keys))


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"admin_port": 0}, "admin_port"),
        ({"admin_port": 70000}, "admin_port"),
        ({"admin_port": 9400, "metrics_port": 9400}, "admin_port"),
    ],
)
def test_ports_that_are_none(settings: Any, param: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        ServerArgs(admin_api_key="admin-key", **settings)
    assert error.value.param == param


def test_a_port_needs_a_key() -> None:
    for check in (
        lambda: bind_app(ServerArgs(admin_port=9401), EngineArgs()),
        lambda: check_ports(ServerArgs(admin_port=9401), 8000),
    ):
        with pytest.raises(InvalidConfig, match="admin_port needs admin_api_key"):
            check()
    with pytest.raises(InvalidConfig, match="must not be the API's"):
        check_ports(ADMIN, 9401)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"127.0.0.1:{port}: Address already in use"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", port) as free:
        assert free.getsockname() == ("127.0.0.1", port)


def test_the_welcome_says_where_it_is() -> None:
    rows, _ = summary([ModelArgs(ADMIN, EngineArgs())], "127.0.0.1", 8000, PLAIN, [None])
    assert ("operators", "rayfin status --url http://127.0.0.1:9401") in rows


def test_keys_of_both_are_different() -> None:
    with pytest.raises(InvalidConfig):
        ServerArgs(api_key="same", admin_api_key="same", admin_port=9401)
    assert ApiKeys.load(["admin-key"]) == ADMIN.admin_keys()
