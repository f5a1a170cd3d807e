"""An operator's routes: who may, what they tell the engines, and that others find none."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rayfin.actors.errors import EngineBusy, InvalidConfig
from rayfin.actors.messages import Command
from rayfin.actors.profile import ProfileOrder
from rayfin.deployments.api.admin import Operated, add_admin_routes
from rayfin.deployments.api.app import build_api
from rayfin.deployments.app import AppArgs, build_app, edge_settings
from rayfin.deployments.http.errors import add_error_handlers
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.paths import ADMIN_PATHS
from rayfin.deployments.serve.server_args import ServerArgs

pytestmark = pytest.mark.anyio
OPERATOR = {"Authorization": "Bearer admin-key"}
CLIENT = {"Authorization": "Bearer client-key"}
READS = (
    *("/admin/engines", "/is_paused", "/is_sleeping", "/server_info", "/get_world_size"),
    *("/weight_info", "/get_weight_version", "/weight_version"),
)


def connect(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def ask(http: httpx.AsyncClient, path: str, **settings: Any) -> httpx.Response:
    method = "DELETE" if path == "/admin/weights/update" else "POST"
    return await http.request("GET" if path in READS else method, path, **settings)


async def test_without_an_admin_key_nothing_is_there(service: Any, engine: Any) -> None:
    async with connect(build_api(service)) as http:
        assert {(await ask(http, path)).status_code for path in ADMIN_PATHS} == {404}
    service.edge.keys = ApiKeys.load(["client-key"])
    async with connect(build_api(service)) as http:
        for headers, status in ((CLIENT, 404), ({}, 401), (OPERATOR, 401)):
            answers = [await ask(http, path, headers=headers) for path in ADMIN_PATHS]
            assert {answer.status_code for answer in answers} == {status}
    assert engine.commands == []


@pytest.mark.parametrize(
    "headers",
    [
        *({}, CLIENT, {"X-Api-Key": "admin-key"}, {"Authorization": "admin-key"}),
        [("Authorization", "Bearer admin-key"), ("Authorization", "Bearer admin-key")],
    ],
)
async def test_no_other_key_will_do(operated: Any, engine: Any, headers: Any) -> None:
    async with connect(build_api(operated)) as http:
        for path in ADMIN_PATHS:
            answer = await ask(http, path, headers=headers)
            assert answer.status_code == (403 if headers == CLIENT else 401), path
            code = "forbidden" if headers == CLIENT else "invalid_api_key"
            assert answer.json()["error"]["code"] == code
    assert engine.commands == []


async def test_the_admin_key_opens_nothing_else(operated: Any) -> None:
    async with connect(build_api(operated)) as http:
        for path in ("/v1/models", "/metrics", "/admin", "/admin/", "/admin/other", "/sleep/"):
            assert (await http.get(path, headers=OPERATOR)).status_code == 401, path
        assert (await http.get("/v1/models", headers=CLIENT)).status_code == 200


async def test_routes_are_closed_by_themselves(service: Any, engine: Any) -> None:
    """Were the layer before them forgotten, or were a route not in its list."""
    app = FastAPI()
    add_error_handlers(app)
    add_admin_routes(app, [Operated(["m"], service.client)])
    assert set(app.openapi()["paths"]) == ADMIN_PATHS
    async with connect(app) as http:
        answers = [await ask(http, path, headers=OPERATOR) for path in ADMIN_PATHS]
    assert {answer.status_code for answer in answers} == {401} and engine.commands == []


@pytest.mark.parametrize(
    ("path", "commands"),
    [
        ("/admin/drain?engine=1", (Command.DRAIN, "1")),
        ("/admin/admit", (Command.ADMIT, None)),
        ("/admin/cache/reset", (Command.RESET_CACHE, None)),
        ("/admin/sleep?engine=0", (Command.SLEEP, "0")),
        ("/admin/wake", (Command.WAKE, None)),
        ("/reset_prefix_cache", (Command.RESET_CACHE, None)),
        ("/sleep?level=1", (Command.SLEEP, None)),
        ("/sleep?level=2", (Command.SLEEP_DEEP, None)),
        ("/wake_up?tags=weights", (Command.LOAD, None)),
        ("/wake_up?tags=weights&tags=kv_cache", (Command.WAKE, None)),
        ("/wake_up", (Command.WAKE, None)),
    ],
)
async def test_commands(operated: Any, engine: Any, path: str, commands: Any) -> None:
    async with connect(build_api(operated)) as http:
        answer = await http.post(path, headers=OPERATOR)
    assert answer.status_code == 200 and engine.commands == [commands]
    wanted = ["0", "1"] if commands[1] is None else [commands[1]]
    assert [own["engine"] for own in answer.json()["engines"]] == wanted


async def test_what_cannot_be_done_is_refused(operated: Any, engine: Any) -> None:
    async with connect(build_api(operated)) as http:
        assert (await http.post("/admin/drain?engine=7", headers=OPERATOR)).status_code == 404
        for path in ("/sleep?level=3", "/sleep?level=x", "/wake_up?tags=graphs"):
            refused = await http.post(path, headers=OPERATOR)
            assert refused.status_code == 400, path
            assert refused.json()["error"]["param"] in path
        assert (await http.get("/admin/drain", headers=OPERATOR)).status_code == 405
    assert engine.commands == []


async def test_profiles(operated: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[Any] = []

    async def prepare(part: Any) -> None:
        if orders == [part]:
            raise EngineBusy("a profile is being taken")
        orders.append(part)

    monkeypatch.setattr(engine, "prepare", prepare)
    body = {"profile_prefix": "a", "delay_iterations": 2, "max_iterations": 9}
    async with connect(build_api(operated)) as http:
        statuses = [
            (await http.post(path, json=given, headers=OPERATOR)).status_code
            for path, given in (
                ("/start_profile", body),
                ("/start_profile", body),
                ("/stop_profile?model=none", None),
                ("/start_profile", {"max_iterations": 1001}),
                ("/start_profile", {"profile_prefix": "../a"}),
                ("/start_profile", {"other": 1}),
                ("/stop_profile", None),
                ("/start_profile", None),
            )
        ]
    assert statuses == [200, 409, 404, 400, 400, 400, 200, 200]
    assert orders == [ProfileOrder(False, "a", 2, 9), ProfileOrder(stop=True), ProfileOrder()]


async def test_engines_are_shown(operated: Any, engine: Any) -> None:
    async with connect(build_api(operated)) as http:
        shown = (await http.get("/admin/engines", headers=OPERATOR)).json()["engines"]
        awake = (await http.get("/is_sleeping", headers=OPERATOR)).json()
    assert [own["state"] for own in shown] == ["ready", "draining"]
    assert shown[0]["stats"]["waiting_tokens"] == 70 and awake == {"is_sleeping": False}


def test_operators_keys_are_their_own() -> None:
    with pytest.raises(InvalidConfig) as error:
        ServerArgs(api_key="same,other", admin_api_key="same")
    assert error.value.param == "admin_api_key"
    with pytest.raises(InvalidConfig, match="admin_api_key must be 1 to 4096"):
        ServerArgs(admin_api_key="with blank")


def test_keys_come_from_the_environment_and_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert edge_settings(ServerArgs()).admin_keys is None
    monkeypatch.setenv("RAYFIN_ADMIN_API_KEY", "canary-of-a-key")
    server, _, edge, *_ = build_app(AppArgs())._bound_deployment.init_args
    assert edge.keys is None
    assert edge.admin_keys.tenant("Bearer canary-of-a-key") is not None
    assert "canary" not in repr((server, edge))
