"""Tokens that tenants may use, with OpenAI's headers."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rayfin.actors.errors import Overloaded, RateLimited
from rayfin.deployments.api.app import build_api
from rayfin.deployments.generation.quotas import TokenQuotas
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.keys import ApiKeys

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hello"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 7},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 7},
    "/v1/responses": {"input": "hello", "max_output_tokens": 7},
    "/v1/messages": {"messages": HELLO, "max_tokens": 7},
}
LIMIT = 120  # tokens a minute: two a second
LEFT = "x-ratelimit-remaining-tokens"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def limited(service: OpenAIService, clock: Clock) -> AsyncIterator[httpx.AsyncClient]:
    service.quotas = TokenQuotas(LIMIT, clock)
    service.edge.keys = ApiKeys.load(["one", "two"])
    transport = httpx.ASGITransport(build_api(service))
    headers = {"Authorization": "Bearer one"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://rayfin", headers=headers
    ) as http:
        yield http


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_prompt_and_output_are_taken(
    limited: httpx.AsyncClient, engine: Any, path: str, stream: bool
) -> None:
    reply = await limited.post(path, json={**ROUTES[path], "stream": stream})
    assert reply.status_code == 200
    prompt = len(engine.seen[0].prompt)
    assert reply.headers["x-ratelimit-limit-tokens"] == "120"
    assert reply.headers[LEFT] == str(LIMIT - prompt)
    assert reply.headers["x-ratelimit-reset-tokens"] == f"{prompt / 2:.3g}s"
    reply = await limited.post(path, json={**ROUTES[path], "stream": stream})
    assert reply.headers[LEFT] == str(LIMIT - 2 * prompt - 7)


async def test_without_a_quota_there_are_no_headers(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/completions", json=ROUTES["/v1/completions"])
    assert not [name for name in reply.headers if name.startswith("x-ratelimit")]


async def test_a_tenant_waits_until_its_debt_is_paid(
    limited: httpx.AsyncClient, engine: Any, clock: Clock
) -> None:
    body = {"prompt": [1] * 60, "max_tokens": 40, "ignore_eos": True, "n": 2}
    assert (await limited.post("/v1/completions", json=body)).status_code == 200
    for path, extra in ROUTES.items():  # 20 over what there was
        refused = await limited.post(path, json=extra)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "11"  # 21 tokens
        assert refused.headers[LEFT] == "0"
        assert refused.headers["x-ratelimit-reset-tokens"] == "1m10s"
        error = refused.json()["error"]
        assert error["type"] == ("rate_limit_error")
        assert error.get("code", "rate_limit_exceeded") == "rate_limit_exceeded"
    other = {"Authorization": "Bearer two"}
    reply = await limited.post("/v1/completions", json=ROUTES["/v1/completions"], headers=other)
    assert reply.status_code == 200
    clock.now = 10.4
    assert (await limited.post("/v1/completions", json=body)).status_code == 429
    clock.now = 10.5
    reply = await limited.post("/v1/completions", json=ROUTES["/v1/completions"])
    assert reply.status_code == 200 and reply.headers[LEFT] == "0"
    clock.now = 1000.0
    reply = await limited.post("/v1/completions", json=ROUTES["/v1/completions"])
    assert reply.headers[LEFT] == str(LIMIT - 3)  # a bucket holds no more than a minute's


async def test_what_the_engine_refuses_costs_nothing(
    limited: httpx.AsyncClient, engine: Any
) -> None:
    body = ROUTES["/v1/completions"]
    engine.refusal = Overloaded("The queue is full.")
    for _ in range(50):
        refused = await limited.post("/v1/completions", json=body)
        assert refused.json()["error"]["code"] == "queue_full"
    assert (await limited.post("/v1/completions", json={**body, "top_p": 3})).status_code == 400
    engine.refusal = None
    assert (await limited.post("/v1/completions", json=body)).headers[LEFT] == str(LIMIT - 3)


async def test_a_stream_that_goes_on_costs_its_tokens_once(
    http: httpx.AsyncClient, service: OpenAIService, clock: Clock
) -> None:
    service.quotas = TokenQuotas(LIMIT, clock)
    path, plain = "/v1/completions", ROUTES["/v1/completions"]
    body, headers = {**plain, "seed": 1, "stream": True}, {"accept": "text/event-stream"}
    whole = (await http.post(path, json=body, headers=headers)).text
    third = [line for line in whole.splitlines() if line.startswith("id: ")][2]
    headers["last-event-id"] = third.removeprefix("id: ")
    rest = await http.post(path, json=body, headers=headers)
    assert rest.status_code == 200 and len(rest.text) < len(whole)
    reply = await http.post(path, json=plain)
    assert reply.headers[LEFT] == str(LIMIT - 3 * 3 - 7)


@pytest.mark.parametrize("marks", ["3", "3,4"])
async def test_a_stream_that_is_not_known_costs_nothing(
    http: httpx.AsyncClient, service: OpenAIService, clock: Clock, marks: str
) -> None:
    service.quotas = TokenQuotas(LIMIT, clock)
    path, plain = "/v1/completions", ROUTES["/v1/completions"]
    headers = {"last-event-id": f"cmpl-{32 * '0'}:{marks}"}
    body = {**plain, "temperature": 1, "stream": True}
    assert (await http.post(path, json=body, headers=headers)).status_code in (400, 404)
    assert (await http.post(path, json=plain)).headers[LEFT] == str(LIMIT - 3)


async def test_searches_and_silent_prompts_count(limited: httpx.AsyncClient, engine: Any) -> None:
    search = {"prompt": [1, 2], "use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 60}
    reply = await limited.post("/v1/completions", json=search)
    used = reply.json()["usage"]["total_tokens"]
    score = {"prompt": [1, 2, 3], "echo": True, "max_tokens": 0, "logprobs": 0}
    reply = await limited.post("/v1/completions", json=score)
    assert reply.headers[LEFT] == str(LIMIT - used - 3)


def test_the_long_run_is_the_rate() -> None:
    """Whatever a tenant tries, it gets a bucket and the rate, and one request's overdraft."""
    clock = Clock()
    quotas = TokenQuotas(600, clock)
    used = 0
    for _ in range(100_000):
        clock.now += 0.01
        try:
            quotas.admit("a", 30)
        except RateLimited as refusal:
            assert 1 <= refusal.retry_after <= 9
            continue
        quotas.spend("a", 50)
        used += 80
    assert 600 + 9_990 - 80 <= used <= 600 + 10_000 + 80


def test_a_prompt_of_more_than_a_minute_runs_once_in_a_while() -> None:
    clock = Clock()
    quotas = TokenQuotas(60, clock)
    quotas.admit("a", 600)
    with pytest.raises(RateLimited) as refused:
        quotas.admit("a", 1)
    assert refused.value.retry_after == 541
    clock.now = 541.0
    quotas.admit("a", 600)
