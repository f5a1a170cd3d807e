"""The layers for Serve's proxy, around a stand-in for it, on a real socket where that matters."""

from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse

from rayfin.deployments.edge import proxy
from rayfin.deployments.edge.listen_options import CALLBACK_PATH
from rayfin.deployments.edge.proxy import middlewares

pytestmark = pytest.mark.anyio


def stack(app: Any) -> Any:
    """As Serve does."""
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app


async def asked(app: Any, path: str = "/x", **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(stack(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:
        return await http.get(path, **options)


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (PlainTextResponse("Path '/x' not found.", 404), 404, "unknown_url"),
        (PlainTextResponse("Request abc timed out.", 408), 408, "request_timeout"),
        (PlainTextResponse("queue", 503, {"retry-after": "7"}), 503, "unavailable"),
        (PlainTextResponse("queue", 429), 429, "rate_limit_exceeded"),
        (PlainTextResponse("Traceback: /secret", 500), 500, "internal_error"),
        (None, 503, "unavailable"),
    ],
)
async def test_serves_failures_have_our_form(answer: Any, status: int, code: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if answer is not None:
            await answer(scope, receive, send)

    response = await asked(app)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "secret" not in response.text and response.headers["x-request-id"]
    given = answer is not None and answer.headers.get("retry-after")
    expected = (given or "1") if status in (429, 503) else None
    assert response.headers.get("retry-after") == expected


@pytest.mark.parametrize("prefix", ["", "/here"])
async def test_an_application_that_has_gone_is_unavailable(prefix: str) -> None:
    """Serve takes its route away first, and then lets its requests finish."""
    gone = False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if gone or not scope["path"].startswith(prefix):
            answer: Any = PlainTextResponse("Path not found.", 404)
        else:
            scope["root_path"] += prefix  # as Serve does
            answer = JSONResponse({})
        await answer(scope, receive, send)

    transport = httpx.ASGITransport(stack(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:
        assert (await http.get("/elsewhere")).status_code == 404 or not prefix
        assert (await http.get(f"{prefix}/x")).status_code == 200
        gone = True
        answer = await http.get(f"{prefix}/x")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable"
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
        assert (await http.get("/elsewhere")).status_code == (404 if prefix else 503)


async def test_serves_failures_have_anthropics_form_where_that_is_spoken() -> None:
    response = await asked(PlainTextResponse("queue", 503), "/v1/messages")
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")
    assert body["request_id"] == response.headers["x-request-id"]


async def test_the_replicas_answers_pass() -> None:
    for answer in (PlainTextResponse("fine"), JSONResponse({"error": {"code": "mine"}}, 404)):
        response = await asked(answer)
        assert (response.status_code, response.content) == (answer.status_code, answer.body)


async def test_the_list_of_routes_is_hidden_and_headers_for_serve_are_dropped() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(name for name, _ in scope["headers"])
        await PlainTextResponse("success")(scope, receive, send)

    assert (await asked(app, "/-/routes")).status_code == 404 and not seen
    headers = {
        "x-request-timeout-seconds": "0",
        "x-request-disconnect-disabled": "?1",
        "x-mine": "y",
    }
    assert (await asked(app, "/-/healthz", headers=headers)).text == "success"
    assert seen.count(b"x-request-id") == 1
    assert not {b"x-request-timeout-seconds", b"x-request-disconnect-disabled"} & set(seen)
    assert b"x-mine" in seen


async def test_an_error_before_the_app_is_answered() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("reached")

    assert (await asked(app, "/" + "x" * 10_000)).status_code == 414
    assert (await asked(app, headers={"x": "y" * 40_000})).status_code == 431


def test_the_path_that_serve_is_told_exists() -> None:
    module, _, name = CALLBACK_PATH.rpartition(".")
    assert module == proxy.__name__ and getattr(proxy, name) is middlewares
