"""Requests with an Idempotency-Key run once; a repeated request gets the same answer."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from rayfin.actors.errors import EngineUnavailable, Overloaded, RequestFailed
from rayfin.deployments.api.app import build_api
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.idempotency import OVERHEAD, AnswerStore
from rayfin.deployments.http.keys import ApiKeys

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hello"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 40},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 40},
}
KEY = {"Idempotency-Key": "order 1"}


async def post(http: httpx.AsyncClient, path: str = "/v1/completions", **more: Any) -> Any:
    headers = more.pop("headers", KEY)
    return await http.post(path, json={**ROUTES[path], **more}, headers=headers)


def replayed(*replies: httpx.Response) -> list[bool]:
    return ["idempotent-replayed" in reply.headers for reply in replies]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_the_same_request_runs_once(
    http: httpx.AsyncClient, engine: Any, path: str, stream: bool
) -> None:
    first = await post(http, path, stream=stream)
    again = await post(http, path, stream=stream)
    assert first.status_code == 200 and len(engine.seen) == 1
    assert again.content == first.content and replayed(first, again) == [False, True]
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    await post(http, path, stream=stream, headers={"Idempotency-Key": "order 2"})
    await post(http, path, stream=stream, headers={})
    await post(http, path, stream=stream, headers={})
    assert len(engine.seen) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_one_in_progress_is_joined(
    http: httpx.AsyncClient, engine: Any, stream: bool
) -> None:
    engine.gate = asyncio.Event()
    asking = [asyncio.create_task(post(http, stream=stream)) for _ in range(3)]
    while not engine.seen:
        await asyncio.sleep(0)
    engine.gate.set()
    replies = await asyncio.gather(*asking)
    assert len(engine.seen) == 1
    assert len({reply.content for reply in replies}) == 1
    assert sorted(replayed(*replies)) == [False, True, True]


async def test_it_goes_on_without_its_client(http: httpx.AsyncClient, engine: Any) -> None:
    engine.gate = asyncio.Event()
    leaving = asyncio.create_task(post(http))
    while not engine.seen:
        await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert not engine.aborted
    engine.gate.set()
    again = await post(http)
    assert again.status_code == 200 and replayed(again) == [True] and len(engine.seen) == 1


async def test_another_request_under_the_key_is_refused(
    http: httpx.AsyncClient, engine: Any
) -> None:
    await post(http)
    for reply in (
        await post(http, max_tokens=41),
        await post(http, "/v1/chat/completions"),
        await http.post("/v1/completions?x=1", json=ROUTES["/v1/completions"], headers=KEY),
    ):
        assert reply.status_code == 409
        assert reply.json()["error"]["code"] == "idempotency_key_reused"
    assert (await post(http, "/v1/messages")).json()["type"] == "error"
    assert len(engine.seen) == 1


@pytest.mark.parametrize("key", ["", "a" * 256, "t\tab", "é"])
async def test_malformed_keys(http: httpx.AsyncClient, key: str) -> None:
    assert (await post(http, headers={"Idempotency-Key": key.encode()})).status_code == 400


async def test_two_keys(http: httpx.AsyncClient) -> None:
    two = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    assert (await post(http, headers=two)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_failures_are_told_and_forgotten(
    http: httpx.AsyncClient, engine: Any, path: str, stream: bool
) -> None:
    """Refused, failed before the first token, in the middle, or by a bug: the next try runs."""
    refused = await post(http, path, stream=stream, temperature=9)
    assert refused.status_code == 400
    engine.refusal = Overloaded("The queue is full.", retry_after=3)
    full = await post(http, path, stream=stream)
    assert full.status_code == 429 and full.headers["retry-after"] == "3"
    engine.refusal = None
    for failure in (EngineUnavailable("gone"), RequestFailed("no"), ValueError("a bug")):
        for number in (0, 2):
            engine.failure = (number, failure)
            reply = await post(http, path, stream=stream)
            assert reply.status_code >= 500 or b"error" in reply.content
            assert replayed(reply) == [False]
    engine.failure = None
    assert replayed(await post(http, path, stream=stream)) == [False]
    assert replayed(await post(http, path, stream=stream)) == [True]


async def test_a_failed_stream_of_lines_is_forgotten(http: httpx.AsyncClient, engine: Any) -> None:
    body = {"model": "org/tiny", "messages": HELLO}
    engine.failure = (2, RequestFailed("no"))
    assert b"error" in (await http.post("/api/chat", json=body, headers=KEY)).content
    engine.failure = None
    assert replayed(await http.post("/api/chat", json=body, headers=KEY)) == [False]


async def test_a_tenant_has_its_own(service: OpenAIService, engine: Any) -> None:
    service.edge.keys = ApiKeys.load(["one", "two"])
    transport = httpx.ASGITransport(build_api(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:
        for key in ("one", "two"):
            headers = {**KEY, "Authorization": f"Bearer {key}"}
            assert replayed(await post(http, headers=headers)) == [False]
            assert replayed(await post(http, headers=headers)) == [True]
        assert (await post(http)).status_code == 401
    assert len(engine.seen) == 2


async def test_limits_hold_before_it(http: httpx.AsyncClient, engine: Any) -> None:
    reply = await http.post("/v1/completions", content=b"x" * (5 * 2**20), headers=KEY)
    assert reply.status_code == 413 and not engine.seen
    assert (await http.get("/v1/models", headers={"Idempotency-Key": ""})).status_code == 200


async def test_what_is_kept_is_bounded(service: OpenAIService, engine: Any) -> None:
    """In bytes: the oldest goes; an answer that alone is too large is never kept."""
    service.answers = AnswerStore(max_bytes=6000)
    transport = httpx.ASGITransport(build_api(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:
        for number in range(9):
            await post(http, headers={"Idempotency-Key": str(number)})
        last = await post(http, headers={"Idempotency-Key": "8"})
        assert replayed(last) == [True] and len(engine.seen) == 9
        assert replayed(await post(http, headers={"Idempotency-Key": "0"})) == [False]
        assert 1 <= len(service.answers) < 9
        long = {"stream": True, "logprobs": 3}
        for _ in range(2):
            reply = await post(http, headers={"Idempotency-Key": "long"}, **long)
            assert replayed(reply) == [False] and reply.text.endswith("data: [DONE]\n\n")
            events = [line for line in reply.text.splitlines() if line.startswith("data: {")]
            assert all(json.loads(event[6:])["choices"] for event in events)


async def test_answers_age_and_number() -> None:
    now = [0.0]
    store = AnswerStore(max_answers=2, max_age=10.0, clock=lambda: now[0])
    first = store.new("a", "1", b"")
    second = store.new("a", "2", b"")
    with pytest.raises(Overloaded):
        store.new("b", "1", b"")
    first.finish()
    third = store.new("b", "1", b"")
    assert store.get("a", "1") is None and store.get("b", "1") is third
    assert store.get("b", "2") is None and second.size() == OVERHEAD
    third.finish()
    now[0] = 11.0
    assert store.get("b", "1") is None
    assert store.get("a", "2") is second  # still in progress
