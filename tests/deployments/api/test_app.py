"""The small endpoints, the API key, and what becomes of clients that leave."""

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayfin.actors.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    GrammarFailed,
    GrammarTooSlow,
    InvalidRequest,
    NoTokenLeft,
    Overloaded,
    RequestFailed,
)
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.settings.kv_events import KVEventSource
from rayfin.deployments.api.app import build_api
from rayfin.deployments.api.responses.store import ResponseStore
from rayfin.deployments.api.responses.store_client import ResponseStoreClient
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.guidance.compile_check import InlineChecker
from rayfin.deployments.http.keys import ApiKeys

pytestmark = pytest.mark.anyio
BODY = {"prompt": "hello", "max_tokens": 50}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


async def until(condition: Callable[[], Any]) -> None:
    """Lets the others run until it holds; only a failure waits so long."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_small_endpoints(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["org/tiny", "tiny"]
    card = (await http.get("/v1/models/org/tiny")).json()
    assert (card["id"], card["max_model_len"], card["object"]) == ("org/tiny", 128, "model")
    assert (card["root"], card["parent"]) == ("org/tiny", None)
    assert card["permission"][0]["allow_sampling"] is True
    assert (await http.get("/v1/models/other")).status_code == 404
    for method, path in (("GET", "/health"), ("GET", "/live"), ("GET", "/ping"), ("POST", "/ping")):
        assert (await http.request(method, path)).status_code == 200
    assert (await http.get("/load")).json() == {"server_load": 0}
    assert "version" in (await http.get("/version")).json()
    assert (await http.get("/metrics")).text == "rayfin_steps_total 7\n"
    assert "/v1/completions" in (await http.get("/")).json()["endpoints"]


async def test_event_sources(http: httpx.AsyncClient, engine: Any) -> None:
    assert (await http.get("/kv_event_sources")).json() == []
    source = {"data_parallel_rank": 1, "endpoint": "tcp://10.0.0.1:5558"}
    source |= {"replay_endpoint": None, "topic": "kv@a"}
    stats = [EngineStats(), EngineStats(kv_events=KVEventSource(**source))]
    engine.reports = [EngineReport.of(str(label), "e", each) for label, each in enumerate(stats)]
    assert (await http.get("/kv_event_sources")).json() == [source]


@pytest.mark.parametrize("keys", [None, ["secret"]])
async def test_a_path_may_end_with_a_slash(service: OpenAIService, keys: Any) -> None:
    """The same answer, and never without the key."""
    service.edge.keys = None if keys is None else ApiKeys.load(keys)
    headers = {"Authorization": "Bearer secret"}
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:
        for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
            for asked in (f"{path}/", f"{path}/?a=b/"):
                reply = await http.post(asked, json=body, headers=headers)
                assert reply.json()["choices"], reply.text
        for path in ("/v1/models/", "/v1/models/org/tiny/", "/health/", "/metrics/"):
            here, there = [await http.get(p, headers=headers) for p in (path, path[:-1])]
            assert here.status_code == 200 and here.content == there.content
            assert (await http.get(path)).status_code == (200 if keys is None else 401)
        for path in ("/v1/completions//", "//", "/v1/nothing/"):
            assert (await http.post(path, json=BODY, headers=headers)).status_code in (404, 405)
    assert service.counts.answers["/v1/completions", "2xx"] == 2


async def test_head_is_get_without_the_body(http: httpx.AsyncClient) -> None:
    paths = ("/", "/health", "/live", "/ping", "/load", "/version", "/metrics", "/ui", "/ui/app.js")
    for path in (*paths, "/v1/models", "/v1/models/org/tiny", "/health/", "/v1/responses/resp_1"):
        head, whole = await http.head(path), await http.get(path)
        assert head.status_code == whole.status_code and head.content == b"", path
        assert head.headers["content-length"] == str(len(whole.content))
    assert (await http.head("/v1/completions")).status_code == 405


async def test_answers_have_the_first_name(http: httpx.AsyncClient, engine: Any) -> None:
    """Of several; as in vLLM, and as ``--served-model-name`` says."""
    engine.named = {9: -1.0, 12: -2.0}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": BODY,
        "/v1/chat/completions": CHAT,
        "/v1/responses": {"input": "hello"},
        "/v1/messages": {**CHAT, "max_tokens": 5},
        "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [9, 12]},
    }
    for path, body in bodies.items():
        for model in ({"model": "tiny"}, {"model": "org/tiny"}, {}):
            assert (await http.post(path, json={**body, **model})).json()["model"] == "org/tiny"
            if "scoring" in path:
                continue
            streamed = await http.post(path, json={**body, **model, "stream": True})
            assert '"org/tiny"' in streamed.text and '"tiny"' not in streamed.text


async def test_invocations_are_both_kinds(http: httpx.AsyncClient, engine: Any) -> None:
    limit = {"max_tokens": 3, "temperature": 0}
    for path, body in (("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", CHAT)):
        there = (await http.post(path, json={**body, **limit})).json()
        here = (await http.post("/invocations", json={**body, **limit})).json()
        same = ("object", "choices", "usage")
        assert [here[name] for name in same] == [there[name] for name in same]
    error = (await http.post("/invocations", json={"input": "hello"})).json()["error"]
    assert error["param"] == "prompt"


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_tells_why_not(http: httpx.AsyncClient, engine: Any, path: str) -> None:
    engine.unhealthy = EngineUnavailable("no step for 60 s")
    assert (await http.get("/live")).status_code == 200
    response = await http.get(path)
    assert response.status_code == 503 and "retry-after" in response.headers
    error = response.json()["error"]
    assert (error["message"], error["code"]) == ("no step for 60 s", "engine_unavailable")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([("Authorization", "Bearer wrong")], 401),
        ([("Authorization", "secret")], 401),
        ([("Authorization", b"Bearer \xff\xfe")], 401),
        ([("Authorization", "Bearer " + "x" * 100_000)], 401),
        ([("Authorization", "Bearer secret"), ("Authorization", "Bearer secret")], 400),
        ([("Authorization", "bearer  secret")], 200),
        ([("Authorization", "Bearer secret")], 200),
    ],
)
async def test_api_key(service: OpenAIService, headers: Any, status: int) -> None:
    """Rows 1 to 5 of the list of bad inputs, and 7."""
    service.edge.keys = ApiKeys.load(["secret"])
    transport = httpx.ASGITransport(build_api(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as client:
        response = await client.get("/v1/models", headers=headers)
        assert response.status_code == status
        if status == 401:
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/health")).status_code == 200
        for path in ("//v1/models", "/V1/models", "/v1/../v1/models", "/v1/models/"):
            assert (await client.get(path)).status_code in (401, 404)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_the_engine_learns_of_tenant_and_timeout(
    service: OpenAIService, engine: Any, path: str
) -> None:
    service.edge.keys = ApiKeys.load(["secret"])
    transport = httpx.ASGITransport(build_api(service))
    body = {"input": "hi"} if path.endswith("responses") else {**BODY, **CHAT, "n": 2}
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as client:
        timed = {**headers, "X-Request-Timeout-Ms": "2500"}
        assert (await client.post(path, json=body, headers=timed)).status_code == 200
        assert {request.timeout for request in engine.seen} == {2.5}
        assert (await client.post(path, json=body, headers=headers)).status_code == 200
        assert engine.seen[-1].timeout is None
        assert {request.tenant for request in engine.seen} == {service.edge.keys.tenants[0][1]}
        for bad in ("0", "-1", "1.5", "soon", "", "9" * 10):
            answer = await client.post(
                path, json=body, headers={**timed, "X-Request-Timeout-Ms": bad}
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "x-request-timeout-ms"


@pytest.mark.parametrize(("reported", "header"), [(17, "17"), (None, "1")])
async def test_a_refused_request_learns_when_to_come_back(
    http: httpx.AsyncClient, engine: Any, reported: int | None, header: str
) -> None:
    engine.refusal = Overloaded("full", retry_after=reported)
    assert (await http.post("/v1/completions", json=BODY)).headers["retry-after"] == header


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("no page fits", "prompt"), 400),
        (Overloaded("queue is full"), 429),
        (DeadlineExceeded("too late"), 408),
        (EngineUnavailable("starting"), 503),
        (RequestFailed("row failed"), 500),
        (NoTokenLeft("no token is left"), 400),
        (GrammarFailed("no token is left"), 400),
        (GrammarTooSlow("it took too long"), 400),
    ],
)
async def test_a_refusal_by_the_engine_has_its_status(
    http: httpx.AsyncClient, engine: Any, path: str, stream: bool, error: Any, status: int
) -> None:
    engine.refusal = error
    response = await http.post(path, json={**BODY, **CHAT, "n": 2, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == error.message
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert (response.headers.get("connection") == "close") == (status == 503)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("failure", "code"),
    [(RequestFailed("row failed"), "engine_error"), (OSError("/etc/secret"), "internal_error")],
)
async def test_a_failure_in_a_stream_is_its_last_event(
    http: httpx.AsyncClient, engine: Any, path: str, failure: Exception, code: str
) -> None:
    engine.failure = (3, failure)
    response = await http.post(path, json={**BODY, **CHAT, "n": 3, "stream": True})
    assert response.status_code == 200
    *_, last, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert "secret" not in response.text and not engine.open


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize("stream", [False, True])
async def test_load_counts_until_the_last_event(
    http: httpx.AsyncClient, engine: Any, path: str, stream: bool
) -> None:
    """A request counts once, whatever its choices."""
    engine.gate = asyncio.Event()
    body = {**BODY, **CHAT, "n": 2, "stream": stream}
    asking = [asyncio.create_task(http.post(path, json=body)) for _ in range(3)]
    await until(lambda: len(engine.open) == 6)
    assert (await http.get("/load")).json() == {"server_load": 3}
    engine.gate.set()
    await asyncio.gather(*asking)
    assert (await http.get("/load")).json() == {"server_load": 0}


async def test_an_unexpected_failure_shows_nothing(http: httpx.AsyncClient, engine: Any) -> None:
    engine.failure = (0, OSError("/etc/secret"))
    response = await http.post("/v1/completions", json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text and "Traceback" not in response.text


async def leave(app: Any, path: str, body: Any, messages: int) -> list[Any]:
    """Posts ``body`` as a server would, and disconnects after so many messages came back."""
    sent: list[Any] = []
    gone = asyncio.Event()
    raw = json.dumps(body).encode()
    inbox = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) >= messages:
            gone.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(b"host", b"rayfin"), (b"content-type", b"application/json")],
        "client": ("test", 1),
        "server": ("rayfin", 80),
    }
    if messages == 0:
        asyncio.get_running_loop().call_later(0.05, gone.set)
    await asyncio.wait_for(app(scope, receive, send), 5)
    return sent


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("stream", "messages"), [(True, 3), (True, 0), (False, 0)])
async def test_leaving_aborts_every_choice(
    service: OpenAIService, engine: Any, path: str, stream: bool, messages: int
) -> None:
    engine.delay = 0.01 if messages else 0.2
    body = {**BODY, **CHAT, "n": 4, "stream": stream}
    sent = await leave(build_api(service), path, body, messages)
    assert len(engine.aborted) == 4 and not engine.open
    if messages == 0:
        assert sent[0]["status"] == 499


SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
GUIDED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi", "guided_json": {"type": "object"}}),
    ("/v1/chat/completions", {**CHAT, "guided_json": {"type": "object"}, "stream": True}),
    ("/v1/messages", {**CHAT, "max_tokens": 9, "output_config": {"format": SCHEMA}}),
    ("/v1/responses", {"input": "hi", "text": {"format": {**SCHEMA, "name": "n"}}}),
    (
        "/v1/responses",
        {"input": "hi", "text": {"format": {**SCHEMA, "name": "n"}}, "background": True},
    ),
]


@pytest.mark.parametrize(("path", "body"), GUIDED, ids=lambda own: str(own)[:20])
async def test_leaving_ends_the_wait_for_a_grammar(
    service: OpenAIService, engine: Any, path: str, body: dict[str, Any]
) -> None:
    said: list[str] = []

    class Endless(InlineChecker):
        async def check(self, texts: Iterable[str], param: str | None, tenant: str = "") -> None:
            said.append("waits")
            try:
                await asyncio.Event().wait()
            finally:
                said.append("ends")

    service.checker = Endless(service.tokenizer)
    api = build_api(service, responses=ResponseStoreClient(store=ResponseStore()))
    sent = await leave(api, path, {"model": "tiny", **body}, 0)
    assert sent[0]["status"] == 499
    assert said == ["waits", "ends"] and engine.seen == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 0.08])
async def test_cancelling_the_handler_aborts_every_choice(
    http: httpx.AsyncClient, engine: Any, path: str, stream: bool, after: float
) -> None:
    engine.delay = 0.05 if after else 60
    body = {**BODY, **CHAT, "n": 2, "stream": stream}
    task = asyncio.create_task(http.post(path, json=body))
    await until(lambda: len(engine.open) == 2)
    await asyncio.sleep(after)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(engine.aborted) == 2 and not engine.open


async def test_a_client_that_stops_reading_is_left(
    service: OpenAIService, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfin.deployments.http.sse.STALLED_SECONDS", 0.05)
    app = build_api(service)
    stuck = asyncio.Event()

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        async def slow(message: Any) -> None:
            if message["type"] == "http.response.body":
                await stuck.wait()
            await send(message)

        await app(scope, receive, slow)

    await leave(outer, "/v1/completions", {**BODY, "stream": True}, 99)
    assert len(engine.aborted) == 1 and not engine.open


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_only_some_tenants_may_set_a_priority(
    service: OpenAIService, engine: Any, tmp_path: Path, path: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("batch:one\ndesk:two\n")
    service.edge.keys = ApiKeys.load(file=str(keys))
    service.edge.priority_tenants = frozenset({"desk"})
    transport = httpx.ASGITransport(build_api(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:
        statuses = {}
        for key in ("one", "two"):
            for priority in (0, -3):
                http.headers["Authorization"] = f"Bearer {key}"
                response = await http.post(path, json={**BODY, **CHAT, "priority": priority})
                statuses[key, priority] = response.status_code
                if response.status_code == 403:
                    error = response.json()["error"]
                    assert (error["code"], error["param"]) == ("permission_denied", "priority")
    assert statuses == {("one", 0): 200, ("one", -3): 403, ("two", 0): 200, ("two", -3): 200}
    assert [request.priority for request in engine.seen] == [0, 0, -3]
