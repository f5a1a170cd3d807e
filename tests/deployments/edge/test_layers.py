"""The layers between a socket and a route, each around a small application of its own."""

import asyncio
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from rayfin.actors.errors import Overloaded
from rayfin.deployments.http.body_limits import MAX_HEADER_BYTES, MAX_HEADERS, MAX_URL
from rayfin.deployments.http.errors import add_error_handlers
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.layers import Cors, HttpSettings, arrange, settings_layers

pytestmark = pytest.mark.anyio


def application(**settings: Any) -> FastAPI:
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    add_error_handlers(app)
    app.user_middleware = arrange("replica", settings_layers(HttpSettings(**settings)))

    @app.get("/health")
    async def health() -> str:
        return "fine"

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    @app.get("/whoami")
    async def whoami(request: Request) -> dict[str, Any]:
        state = request.state
        return {"tenant": getattr(state, "tenant", ""), "request_id": state.request_id}

    @app.get("/fails")
    async def fails(kind: str) -> None:
        raise Overloaded("full") if kind == "known" else OSError("/etc/secret")

    return app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rayfin")


def check(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code


async def raw(app: Any, scope: dict[str, Any], inbox: list[Any] | None = None) -> list[Any]:
    """Talks ASGI by hand, for what no HTTP client would send."""
    sent: list[Any] = []
    messages = list(inbox or [{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    base = {
        "type": "http",
        "method": "GET",
        "path": "/health",
        "raw_path": b"/health",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(b"host", b"rayfin")],
        "asgi": {"version": "3.0"},
        "client": ("test", 1),
        "server": ("rayfin", 80),
    }
    await asyncio.wait_for(app({**base, **scope}, receive, send), 30)
    return sent


async def test_a_long_url_and_large_headers() -> None:
    """Row 28."""
    async with client_of(application()) as http:
        check(await http.get("/health?" + "x" * MAX_URL), 414, "url_too_long")
        check(await http.get("/" + "x" * MAX_URL), 414, "url_too_long")
        long = await http.get("/health", headers={"x": "y" * MAX_HEADER_BYTES})
        check(long, 431, "headers_too_large")
        many = [(f"x-{i}", "y") for i in range(MAX_HEADERS + 1)]
        check(await http.get("/health", headers=many), 431, "headers_too_large")
        assert (await http.get("/health?" + "x" * 1000)).status_code == 200


HOST = b"host"


@pytest.mark.parametrize(
    ("headers", "version", "status"),
    [
        ([(HOST, b"rayfin")], "1.1", 200),
        ([(HOST, b"rayfin:8000")], "1.1", 200),
        ([(HOST, b"[::1]:8000")], "1.1", 200),
        ([], "1.0", 200),
        ([], "1.1", 400),
        ([(HOST, b"a"), (HOST, b"a")], "1.1", 400),
        ([(HOST, b"a/?x=")], "1.1", 400),
        ([(HOST, b"a/#")], "1.1", 400),
        ([(HOST, b"[")], "1.1", 400),
        ([(HOST, b"")], "1.1", 400),
        ([(HOST, b"user@a")], "1.1", 400),
        ([(HOST, b"a:99999999")], "1.1", 400),
    ],
)
async def test_hosts(headers: Any, version: str, status: int) -> None:
    """Row 6."""
    sent = await raw(application(), {"headers": headers, "http_version": version})
    assert sent[0]["status"] == status


@pytest.mark.parametrize("method", ["FOO", "PROPFIND", "get"])
async def test_what_is_no_method_of_http(method: str) -> None:
    """Row 8."""
    sent = await raw(application(), {"method": method})
    assert sent[0]["status"] == 400


async def test_a_target_that_is_no_path() -> None:
    """Row 6."""
    sent = await raw(application(), {"path": "@evil", "raw_path": b"@evil"})
    assert sent[0]["status"] == 400


@pytest.mark.parametrize("keys", [None, "secret"])
async def test_websockets_are_refused(keys: str | None) -> None:
    """Row 37."""
    app = application(keys=ApiKeys.load([keys]) if keys else None)
    scope = {"type": "websocket", "extensions": {"websocket.http.response": {}}}
    sent = await raw(app, {**scope, "path": "/v1"}, [{"type": "websocket.connect"}])
    assert sent[0]["type"] == "websocket.http.response.start"
    assert sent[0]["status"] == (401 if keys else 400)


async def test_bodies_are_counted() -> None:
    """Row 24."""

    async def chunks(count: int) -> Any:
        for _ in range(count):
            yield b"x" * 10

    async with client_of(application(max_body_bytes=100)) as http:
        assert (await http.post("/echo", content=b"x" * 100)).text == "x" * 100
        assert (await http.post("/echo", content=chunks(10))).text == "x" * 100
        check(await http.post("/echo", content=b"x" * 101), 413, "request_too_large")
        late = await http.post("/echo", content=chunks(11))
        check(late, 413, "request_too_large")
        assert late.headers["connection"] == "close"


async def test_a_declared_size_is_refused_before_the_body_is_asked_for() -> None:
    """Rows 24 and 34."""
    headers = [(HOST, b"a"), (b"content-length", b"101"), (b"expect", b"100-continue")]
    scope = {"method": "POST", "path": "/echo", "headers": headers}

    async def receive() -> Any:
        raise AssertionError("asked for the body")

    app = application(max_body_bytes=100)
    inner = app.build_middleware_stack()

    async def without_body(scope: Any, _: Any, send: Any) -> None:
        await inner(scope, receive, send)

    assert (await raw(without_body, scope))[0]["status"] == 413


async def test_a_slow_body_is_not_waited_for() -> None:
    """Rows 25 and 30."""
    inbox = [{"type": "http.request", "body": b"{", "more_body": True}]  # and then nothing
    app = application(body_seconds=0.05)
    sent = await raw(app, {"method": "POST", "path": "/echo"}, inbox)
    assert sent[0]["status"] == 408


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "identity, gzip"])
async def test_compressed_bodies_are_refused(encoding: str) -> None:
    """Row 26."""
    async with client_of(application()) as http:
        answer = await http.post("/echo", content=b"x", headers={"Content-Encoding": encoding})
        check(answer, 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "path",
    ["/", "/version", "/metrics", "/docs", "/openapi.json", "/whoami", "//health", "/health/"]
    + ["/HEALTH", "/v1/../health", "/%2fhealth", "/health%2f", "/invocations", "/-/routes"]
    + ["/health;x", "/health%00", "/.//health", "/x/health"],
)
async def test_only_health_is_open(path: str) -> None:
    """Rows 7 and 38."""
    scope = {"path": unquote(path), "raw_path": path.encode()}  # as uvicorn has it
    sent = await raw(application(keys=ApiKeys.load(["secret"])), scope)
    assert sent[0]["status"] == 401


async def test_a_prefix_of_the_application_is_no_part_of_the_path() -> None:
    app = application(keys=ApiKeys.load(["secret"]))
    for path, root, status in [
        ("/app/health", "/app", 200),
        ("/app/whoami", "/app", 401),
        ("/app/app/health", "/app", 401),
        ("/whoami", "/health", 401),
    ]:
        sent = await raw(app, {"path": path, "raw_path": path.encode(), "root_path": root})
        assert sent[0]["status"] == status, path


async def test_a_route_knows_the_tenant() -> None:
    keys = ApiKeys((*ApiKeys.load(["a"]).tenants, (b"0" * 32, "stranger")))  # type: ignore[union-attr]
    async with client_of(application(keys=keys)) as http:
        answer = await http.get("/whoami", headers={"Authorization": "Bearer a"})
        assert answer.json()["tenant"] == keys.tenants[0][1]
    async with client_of(application()) as http:
        assert (await http.get("/whoami")).json()["tenant"] == ""


async def test_request_ids_are_labels() -> None:
    """Row 35."""
    async with client_of(application()) as http:
        one, two = [await http.get("/whoami") for _ in range(2)]
        made = one.headers["x-request-id"]
        assert made == one.json()["request_id"] != two.headers["x-request-id"]
        given = await http.get("/whoami", headers={"X-Request-Id": "my.id_1-2"})
        assert given.headers["x-request-id"] == "my.id_1-2" == given.json()["request_id"]
        for failed in ("/nowhere", "/fails?kind=known", "/fails?kind=other"):
            answer = await http.get(failed, headers={"X-Request-Id": "mine"})
            assert answer.headers.get_list("x-request-id") == ["mine"]


@pytest.mark.parametrize(
    "values", [[b""], [b"x" * 129], [b"a b"], [b"\xff"], [b"a", b"a"], [b"a/b"], [b"a\n"]]
)
async def test_odd_request_ids_are_refused(values: list[bytes]) -> None:
    """Row 36."""
    headers = [(HOST, b"a"), *((b"x-request-id", value) for value in values)]
    sent = await raw(application(), {"headers": headers})
    assert sent[0]["status"] == 400


async def test_failures_show_nothing_and_are_of_one_form() -> None:
    """Rows 8 and 9, among others."""
    async with client_of(application()) as http:
        known = await http.get("/fails?kind=known")
        check(known, 429, "queue_full")
        assert int(known.headers["retry-after"]) >= 1
        other = await http.get("/fails?kind=other")
        check(other, 500, "internal_error")
        assert "secret" not in other.text
        check(await http.get("/nowhere"), 404, "unknown_url")
        wrong = await http.post("/health")
        check(wrong, 405, "method_not_allowed")
        assert wrong.headers["allow"] == "GET"
        check(await http.get("/fails"), 400, "missing_required_parameter")


async def test_browsers_need_leave() -> None:
    question = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    keys = ApiKeys.load(["secret"])
    async with client_of(application(keys=keys)) as http:
        assert (await http.options("/echo", headers=question)).status_code == 401
        answer = await http.get("/health", headers=question)
        assert "access-control-allow-origin" not in answer.headers
    cors = Cors(origins=("https://a.example",))
    async with client_of(application(keys=keys, cors=cors)) as http:
        allowed = await http.options("/echo", headers=question)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        refused = await http.get("/whoami", headers=question)
        check(refused, 401, "invalid_api_key")
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = await http.get("/health", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
