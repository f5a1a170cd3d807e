"""``use_beam_search`` on both endpoints: one engine request a prompt, a hypothesis a choice."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.guidance import Guidance, Thinking
from rayfin.actors.messages import BeamParams
from rayfin.deployments.generation.beams import check_search
from rayfin.deployments.generation.plan import OutputPlan

pytestmark = pytest.mark.anyio
REPLY = "Sure — here you go: 👩‍👩‍👧 مرحبا.\n\nEND of it"
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 100}


async def test_a_completion_of_beams(http: httpx.AsyncClient, engine: Any) -> None:
    body = {**BEAMS, "prompt": ["hello", "you"], "length_penalty": 0.5, "early_stopping": "never"}
    reply = (await http.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop", *["length"] * 2] * 2
    assert reply["choices"][0]["text"] == reply["choices"][3]["text"] == REPLY
    assert REPLY.startswith(reply["choices"][1]["text"]) and reply["choices"][1]["text"] != REPLY
    assert [request.beams for request in engine.seen] == [BeamParams(3, 0.5, "never")] * 2
    assert [request.stopping.max_tokens for request in engine.seen] == [100, 100]
    tokens = 3 * len(engine.reply) + 1 - 1 - 2
    assert reply["usage"]["completion_tokens"] == 2 * tokens
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert engine.open == set() and engine.aborted == []


async def test_a_chat_of_beams(http: httpx.AsyncClient, engine: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, **BEAMS, "temperature": 0.0, "return_token_ids": True}
    reply = (await http.post("/v1/chat/completions", json=body)).json()
    contents = [choice["message"]["content"] for choice in reply["choices"]]
    assert contents[0] == REPLY and len(contents) == 3
    assert reply["choices"][1]["token_ids"] == engine.reply[:-1]
    assert engine.seen[0].beams == BeamParams(3)


async def test_without_a_limit_a_chat_search_takes_what_fits(
    http: httpx.AsyncClient, engine: Any
) -> None:
    """128 positions there are; but three beams in 60 pages of 4 tokens are shorter."""
    engine.limits = type(engine.limits)("engine", 128, engine.limits.vocab_size, 60, 4)
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "use_beam_search": True, "n": 3}
    await http.post("/v1/chat/completions", json=body)
    (request,) = engine.seen
    shared, most = len(request.prompt) // 4, request.stopping.max_tokens

    def pages(tokens: int) -> int:
        return shared + 3 * (-(-(len(request.prompt) + tokens - 1) // 4) - shared)

    assert pages(most) <= 60 < pages(most + 1)


@pytest.mark.parametrize("kept", [2, -1])
@pytest.mark.parametrize("side", ["left", "right"])
async def test_prompts_of_searches_are_cut_like_others(
    http: httpx.AsyncClient, engine: Any, kept: int, side: str
) -> None:
    """By as many tokens, and by what the answer leaves of the context."""
    body = {"prompt": list(range(2, 122)), "max_tokens": 30, "temperature": 0}
    body |= {"truncate_prompt_tokens": kept, "truncation_side": side}
    for beams in ({}, {"use_beam_search": True, "n": 2}):
        response = await http.post("/v1/completions", json={**body, **beams})
        assert response.status_code == 200, response.text
    plain, searched = engine.seen
    assert searched.beams is not None and len(searched.prompt) == (2 if kept == 2 else 98)
    assert searched.prompt.tolist() == plain.prompt.tolist()
    assert searched.stopping.max_tokens == plain.stopping.max_tokens == 30


def test_a_budget_of_thoughts_goes_with_no_search() -> None:
    thinking = Thinking("</think>", (7,), starts_inside=True)
    check_search(OutputPlan(guidance=Guidance(thinking=thinking)))
    with pytest.raises(InvalidRequest, match="budget") as caught:
        check_search(OutputPlan(guidance=Guidance(thinking=replace(thinking, budget=3))))
    assert caught.value.param == "use_beam_search"


async def test_one_beam_is_the_default(http: httpx.AsyncClient, engine: Any) -> None:
    body = {"prompt": "hello", "use_beam_search": True, "ignore_eos": True}
    reply = (await http.post("/v1/completions", json=body)).json()
    assert len(reply["choices"]) == 1
    assert engine.seen[0].beams == BeamParams(1)
    assert engine.seen[0].stopping.stop_token_ids == frozenset()


async def test_what_the_engine_refuses(http: httpx.AsyncClient, engine: Any) -> None:
    engine.refusal = InvalidRequest("a beam search of width 3 takes 3 rows", "n")
    response = await http.post("/v1/completions", json={"prompt": "hello", **BEAMS})
    assert response.status_code == 400 and response.json()["error"]["param"] == "n"


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_no_streams(http: httpx.AsyncClient, engine: Any, route: str) -> None:
    message = [{"role": "user", "content": "hello"}]
    body = {"prompt": "hello"} if route == "/v1/completions" else {"messages": message}
    response = await http.post(route, json={**body, **BEAMS, "stream": True})
    assert response.status_code == 400 and response.json()["error"]["param"] == "stream"
    assert engine.seen == []


@pytest.mark.parametrize(
    "fields, param, code",
    [
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"n": 129}, "n", "integer_above_max_value"),
        ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
        ({"temperature": 0.7}, "temperature", "invalid_value"),
        ({"top_p": 0.5}, "top_p", "invalid_value"),
        ({"stop": "x"}, "stop", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "integer_below_min_value"),
        ({"logprobs": 1}, "logprobs", "invalid_value"),
        ({"best_of": 3}, "best_of", "invalid_value"),
        ({"length_penalty": "x"}, "length_penalty", "invalid_type"),
        ({"length_penalty": 5.5}, "length_penalty", "invalid_value"),
        ({"early_stopping": "later"}, "early_stopping", "invalid_value"),
        ({"early_stopping": []}, "early_stopping", "invalid_value"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ],
)
async def test_what_goes_with_no_search(
    http: httpx.AsyncClient, engine: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    body = {"prompt": "hello", "use_beam_search": True, **fields}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 400 and engine.seen == []
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
