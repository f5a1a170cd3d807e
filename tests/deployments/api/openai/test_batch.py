"""Several conversations in one request, and scores of tokens that may come next."""

import math
from dataclasses import replace
from typing import Any

import httpx
import pytest

import vllm_shapes as shapes
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.formats import REASONING_FORMATS
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
CHAT, BATCH, SCORES = "/v1/chat/completions", "/v1/chat/completions/batch", "/generative_scoring"
HELLO = [{"role": "user", "content": "hello"}]
LONGER = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "tokens"}]
WORLD = [*HELLO, {"role": "assistant", "content": "world"}]
ASKED: dict[str, Any] = {"query": "hello", "items": ["world", "you go"], "label_token_ids": [9, 12]}


async def refused(http: httpx.AsyncClient, path: str, body: Any) -> str:
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["param"])


async def test_each_conversation_is_a_choice(http: httpx.AsyncClient, engine: Any) -> None:
    """The same as one request for each would get."""
    fields = {"max_tokens": 90, "logprobs": True, "top_logprobs": 1, "seed": 7, "stop": ["END"]}
    conversations = [HELLO, LONGER, HELLO]
    reply = (await http.post(BATCH, json={"messages": conversations, **fields})).json()
    prompts = [request.prompt.tolist() for request in engine.seen]
    engine.seen.clear()
    shapes.check(reply, shapes.CHAT)
    singles = [
        (await http.post(CHAT, json={"messages": messages, **fields})).json()
        for messages in conversations
    ]
    assert reply["choices"] == [
        {**single["choices"][0], "index": i} for i, single in enumerate(singles)
    ]
    assert prompts == [request.prompt.tolist() for request in engine.seen]
    for name in ("prompt_tokens", "completion_tokens"):
        assert reply["usage"][name] == sum(single["usage"][name] for single in singles)


async def test_roles_and_echoes_are_those_of_each(http: httpx.AsyncClient) -> None:
    body = {"messages": [WORLD, [{"role": "user", "content": "I am"}]], "echo": True}
    body |= {"add_generation_prompt": False, "continue_final_message": True, "max_tokens": 3}
    first, second = (await http.post(BATCH, json=body)).json()["choices"]
    assert (first["message"]["role"], second["message"]["role"]) == ("assistant", "user")
    assert first["message"]["content"].startswith("world")
    assert second["message"]["content"].startswith("I am")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HELLO}, "messages[0]"),
        ({"messages": None}, "messages"),
        ({"messages": [HELLO, []]}, "messages[1]"),
        ({"messages": [HELLO, [{"role": "user", "content": "x" * 300_000}]]}, "messages[1]"),
        ({"messages": [HELLO, [{"role": "user"}]]}, "messages[1][0].content"),
        ({"messages": [HELLO] * 5}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        (
            {"kv_transfer_params": {"prompt_token_ids": [1]}},
            "kv_transfer_params.prompt_token_ids",
        ),
    ],
)
async def test_batches_that_are_refused(
    http: httpx.AsyncClient, service: OpenAIService, fields: dict[str, Any], param: str
) -> None:
    service.replies = replace(service.replies, max_prompts=4)
    assert await refused(http, BATCH, {"messages": [HELLO], **fields}) == param


async def test_a_batch_has_one_plan(http: httpx.AsyncClient, service: OpenAIService) -> None:
    """So no conversation may end in a thought where another does not."""
    service.formats = Detected(None, REASONING_FORMATS["think"])
    thought = [*HELLO, {"role": "assistant", "content": "<think>"}]
    body = {"messages": [WORLD, thought], "continue_final_message": True, "max_tokens": 3}
    assert await refused(http, BATCH, body) == "messages[1]"
    body["messages"] = [thought, thought]
    assert (await http.post(BATCH, json=body)).is_success


async def test_scores(http: httpx.AsyncClient, engine: Any, tokenizer: Tokenizer) -> None:
    engine.named = {9: -1.0, 12: -2.0}
    likely, other = math.exp(-1), math.exp(-2)
    query = tokenizer.encode("hello")
    items = [tokenizer.encode(text, False) for text in ASKED["items"]]
    for fields, score, prompts in (
        ({}, likely / (likely + other), [query + item for item in items]),
        ({"apply_softmax": False}, likely, [query + item for item in items]),
        ({"item_first": True}, likely / (likely + other), [item + query for item in items]),
        ({"query": query, "items": items}, likely / (likely + other), [query + i for i in items]),
        ({"label_token_ids": [12], "apply_softmax": False}, other, [query + i for i in items]),
    ):
        engine.seen.clear()
        reply = (await http.post(SCORES, json={**ASKED, **fields})).json()
        shapes.check(reply, shapes.SCORES)
        assert [one["score"] for one in reply["data"]] == pytest.approx([score] * 2)
        assert [request.prompt.tolist() for request in engine.seen] == prompts
        assert {request.stopping.max_tokens for request in engine.seen} == {1}
        assert reply["usage"]["completion_tokens"] == 2
    long = {**ASKED, "items": [[5] * 500]}
    assert (await http.post(SCORES, json=long)).is_success
    assert len(engine.seen[-1].prompt) == 127


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({name: None}, name) for name in ASKED),
        ({"query": ["a", "b"]}, "query"),
        ({"query": ""}, "query"),
        ({"items": []}, "items"),
        ({"items": "world"}, "items"),
        ({"items": ["a", [5]]}, "items[1]"),
        ({"items": ["a", {"prompt": "b"}]}, "items[1]"),
        ({"items": ["a", ""]}, "items[1]"),
        ({"items": [[5], [999999]]}, "items[1]"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [999999]}, "label_token_ids"),
        ({"label_token_ids": [3] * 129}, "label_token_ids"),
        ({"cache_salt": "@"}, "cache_salt"),
        ({"priority": 2**40}, "priority"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
async def test_scores_that_are_refused(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    assert await refused(http, SCORES, {**ASKED, **fields}) == param
