"""/metrics has the same series whatever clients send: no value of theirs becomes a label."""

import asyncio
import json
import random
import string
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi import FastAPI

from rayfin.deployments.api.app import build_api
from rayfin.deployments.client.metered import MeteredEngineClient
from rayfin.deployments.client.pool import EnginePool
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.layers import HttpSettings
from rayfin.deployments.telemetry.ingress_counters import IngressCounters
from rayfin.deployments.telemetry.load import Load
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow(reason="sends every kind of request")]
REQUESTS, AT_ONCE = 10_000, 16
KEY = b"Bearer right"
PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/invocations", "/tokenize", "/v1/models/{}", "/metrics/{}", "/{}", "/v1/{}/completions"),
    *("/ui/{}", "/admin/{}", "/health", "/v1/responses/{}", "/openapi.json", "//metrics"),
)
METHODS = ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW")
HEADERS = (
    *(b"x-request-id", b"x-session-id", b"x-request-timeout-ms", b"idempotency-key", b"user-agent"),
    *(b"traceparent", b"x-api-key", b"content-type", b"last-event-id", b"host", b"origin"),
)
Answer = tuple[int, bytes]


@pytest.fixture
async def api(world: Any, tokenizer: Tokenizer) -> AsyncIterator[FastAPI]:
    """Two models, each with the real scheduler, client and books; nothing but Ray is missing."""
    edge = HttpSettings(keys=ApiKeys.load(["right"]), admin_keys=ApiKeys.load(["operator"]))
    load, services, clients = Load(), [], []
    for name in ("org/tiny", "large"):
        scheduler = world.start(name, vocab_size=tokenizer.vocab_size, num_pages=64)
        clients.append(EnginePool("edge", lambda own={name: scheduler}: own))  # type: ignore[misc]
        counts = IngressCounters()
        client = MeteredEngineClient(clients[-1], counts, name, alias="vllm")
        services.append(
            OpenAIService(client, tokenizer, [name], 128, edge=edge, load=load, counts=counts)
        )
        await client.info()  # so it is connected
    yield build_api(*services)
    for own in clients:
        own.close()


async def ask(
    api: FastAPI, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes = b""
) -> Answer:
    """As a server calls the application: what a client library would not send is sent as well."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"model=" + path.encode(),
        "headers": [(b"host", b"rayfin"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("rayfin", 80),
    }
    said: list[Any] = []
    heard = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        for message in heard:
            return message
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        said.append(message)

    await api(scope, receive, send)
    return said[0]["status"], b"".join(own.get("body", b"") for own in said[1:])


async def series(api: FastAPI) -> set[bytes]:
    """Names and labels."""
    status, text = await ask(api, "GET", "/metrics", [(b"authorization", KEY)])
    assert status == 200
    reported = [line.rpartition(b" ")[0] for line in text.splitlines() if not line.startswith(b"#")]
    assert len(reported) == len(set(reported))
    return set(reported)


class Stranger:
    """One after the other, requests never seen before, from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._values: tuple[Callable[[], Any], ...] = (
            *(self._word, self._integer, self._random.random, dict, list),
            *(lambda: None, lambda: True, lambda: [self._word()], lambda: {self._word(): 1}),
        )

    def request(self) -> tuple[str, str, list[tuple[bytes, bytes]], bytes]:
        pick = self._random.choice
        path = pick(PATHS[:6] if self._random.random() < 0.5 else PATHS).replace("{}", self._word())
        method = "POST" if self._random.random() < 0.7 else pick(METHODS)
        key = KEY if self._random.random() < 0.8 else f"Bearer {self._word()}".encode()
        words = [(pick(HEADERS), self._word().encode()) for _ in range(self._random.randrange(3))]
        if self._random.random() < 0.9:
            words.append((b"content-type", b"application/json"))
        return method, path, [(b"authorization", key), *words], self._body()

    def _body(self) -> bytes:
        if (kind := self._random.random()) < 0.1:
            return self._random.randbytes(30)
        text = "hello " + self._word()
        body: dict[str, Any] = {
            "model": self._random.choice(("org/tiny", "large", None, self._word())),
            self._random.choice(("prompt", "input")): text,
            "messages": [{"role": self._random.choice(("user", self._word())), "content": text}],
            "max_tokens": self._random.randrange(4),
            "max_output_tokens": 2,
            "stream": self._random.random() < 0.2,
        }
        if kind < 0.3:  # well-formed, where it is for this path
            body["model"] = self._random.choice(("org/tiny", "large"))
            body["messages"][0]["role"], body["max_tokens"] = "user", 2
            body.pop("prompt" if self._random.random() < 0.5 else "messages", None)
        else:
            for name in ("user", "priority", "stop", "seed", "n", "tools", self._word()):
                if self._random.random() < 0.3:
                    body[name] = self._random.choice(self._values)()
        reported = json.dumps({name: value for name, value in body.items() if value is not None})
        return reported.encode()[: self._random.randrange(60) if 0.3 < kind < 0.35 else None]

    def _word(self) -> str:
        letters = string.ascii_letters + string.digits + "-_.~%{}\"\\'=,\n\téß漢"
        return "".join(self._random.choices(letters, k=self._random.randint(1, 40)))

    def _integer(self) -> int:
        return self._random.randrange(-(2**40), 2**40)


async def test_no_request_makes_a_series(api: FastAPI, depth: Callable[[int], int]) -> None:
    known = await series(api)
    assert {own.partition(b"_")[0].partition(b":")[0] for own in known} == {b"rayfin", b"vllm"}
    stranger = Stranger(1)
    statuses: dict[int, int] = {}
    count = depth(REQUESTS)
    left = iter(range(count))

    async def one_after_the_other() -> None:
        for _ in left:
            status, _ = await ask(api, *stranger.request())
            statuses[status] = statuses.get(status, 0) + 1

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
    assert await series(api) == known
    assert sum(statuses.values()) == count and max(statuses) < 500
    assert min(statuses.get(status, 0) for status in (200, 400, 401, 404, 405, 415)) > count / 100
