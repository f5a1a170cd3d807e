"""``best_of`` on both endpoints: all run, the likeliest are given, all are counted."""

from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio


def _tokens(reply: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in reply["choices"]]


async def test_the_likeliest_come_first(http: httpx.AsyncClient, engine: Any) -> None:
    """Seeds 7, 8, 9, 10 and 11: the fake finds 9 the likeliest, then 8."""
    body = {"prompt": ["hello", "you"], "n": 2, "best_of": 5, "seed": 7, "max_tokens": 6}
    reply = (await http.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [request.sampling.seed for request in engine.seen] == [7, 8, 9, 10, 11] * 2
    assert all(request.sampling.logprobs == 0 for request in engine.seen)
    assert reply["usage"]["completion_tokens"] == 2 * 5 * 6
    assert all(choice["logprobs"] is None for choice in reply["choices"])


async def test_ranked_by_what_they_say(http: httpx.AsyncClient, engine: Any) -> None:
    """The choices differ by their seeds: each says its seed's digit."""
    deltas = engine._deltas

    def by_seed(request: Any) -> Any:
        said = deltas(request)
        for delta in said:
            delta.tokens = [engine.reply[request.sampling.seed % 10]] * len(delta.tokens)
        return said

    engine._deltas = by_seed
    body = {"prompt": "hello", "n": 3, "best_of": 4, "seed": 7, "max_tokens": 2}
    for extra in ({}, {"return_token_ids": True}):
        reply = (await http.post("/v1/completions", json={**body, **extra})).json()
    assert _tokens(reply) == [[engine.reply[digit]] * 2 for digit in (9, 8, 7)]
    messages = [{"role": "user", "content": "hello"}]
    chat = {**body, "messages": messages, "return_token_ids": True}
    del chat["prompt"]
    reply = (await http.post("/v1/chat/completions", json=chat)).json()
    assert _tokens(reply) == [[engine.reply[digit]] * 2 for digit in (9, 8, 7)]


async def test_as_many_as_asked_for_are_not_ranked(http: httpx.AsyncClient, engine: Any) -> None:
    body = {"prompt": "hello", "n": 2, "best_of": 2, "seed": 7, "max_tokens": 2}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert all(request.sampling.logprobs is None for request in engine.seen)
    assert (await http.post("/v1/completions", json={**body, "stream": True})).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2, "stream": True},
        {"n": 3, "best_of": 2},
        {"best_of": 16385},
        {"best_of": 2, "temperature": 0},
        {"prompt": ["a"] * 128, "best_of": 129},
    ],
)
async def test_refusals(http: httpx.AsyncClient, engine: Any, fields: dict[str, Any]) -> None:
    response = await http.post("/v1/completions", json={"prompt": "hello", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == "best_of"
    assert engine.seen == []
