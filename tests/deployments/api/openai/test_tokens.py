"""Token ids in, token ids out, against completions of the same tokens."""

import asyncio
import base64
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from rayfin.deployments.api.app import build_api
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.keys import ApiKeys

pytestmark = pytest.mark.anyio
PATH, ABORT, COMPLETIONS = (
    *("/inference/v1/generate", "/inference/v1/abort_requests"),
    "/v1/completions",
)
IDS = [5, 6, 7, 8]
SAMPLING = {"max_tokens": 12, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}
STREAM = {"accept": "text/event-stream"}


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Ids and data of a stream, without [DONE]."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if lines.get("data", "[DONE]") != "[DONE]":
            found.append((lines.get("id", ""), json.loads(lines["data"])))
    return found


async def test_tokens_are_those_of_a_completion(http: httpx.AsyncClient) -> None:
    plain = (
        await http.post(
            COMPLETIONS, json={"prompt": IDS, "return_token_ids": True, "n": 2, **SAMPLING}
        )
    ).json()
    body = {"token_ids": IDS, "sampling_params": {**SAMPLING, "n": 2}, "return_token_ids": True}
    reply = (await http.post(PATH, json={**body, "request_id": "mine"})).json()
    assert "error" not in reply, reply
    assert (reply["request_id"], reply["prompt_token_ids"]) == ("mine", IDS)
    assert [own["token_ids"] for own in reply["choices"]] == [
        own["token_ids"] for own in plain["choices"]
    ]
    assert reply["prompt_logprobs"] == plain["choices"][0]["prompt_logprobs"]
    entries = reply["choices"][0]["logprobs"]["content"]
    named = [f"token_id:{token}" for token in reply["choices"][0]["token_ids"]]
    assert [entry["token"] for entry in entries] == named
    assert reply["usage"] == plain["usage"]
    text = (await http.post(PATH, json={**body, "output_mode": "text"})).json()["choices"][0]
    assert (text["text"], text["token_ids"]) == (plain["choices"][0]["text"], None)


async def test_log_probabilities_for_trainers(http: httpx.AsyncClient, engine: Any) -> None:
    asked = {"max_tokens": 2, "prompt_logprob_token_ids": [[5, 6], [7, 1]], "logprobs": 0}
    asked |= {"prompt_logprob_start": 1, "return_sampling_mask": True, "top_k": 2}
    body = {"token_ids": IDS, "sampling_params": asked, "return_weight_versions": True}
    reply = (await http.post(PATH, json=body)).json()
    sampling = engine.seen[-1].sampling
    assert (sampling.prompt_logprob_ids, sampling.prompt_logprob_start) == (((5, 6), (7, 1)), 1)
    assert sampling.processed and sampling.prompt_logprobs == 0
    assert len(reply["choices"][0]["sampling_mask"]) == 2 and "weight_versions" in str(reply)
    file = io.BytesIO(base64.b64decode(reply["prompt_token_id_logprobs"]))
    assert np.load(file).shape == (2, 2)
    streamed = await http.post(PATH, json={**body, "stream": True})
    assert streamed.json()["error"]["param"] == "prompt_logprob_token_ids"


async def test_a_stream_adds_up_and_resumes(http: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"token_ids": IDS, "sampling_params": {"max_tokens": 9, "seed": 3}}
    whole = (await http.post(PATH, json=body)).json()["choices"][0]["token_ids"]
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    parts = events((await http.post(PATH, json=asked, headers=STREAM)).text)
    *chunks, (_, last) = parts
    assert last["usage"]["completion_tokens"] == 9
    assert [token for _, one in chunks for token in one["choices"][0]["token_ids"]] == whole
    assert chunks[-1][1]["choices"][0]["finish_reason"] == "length"
    headers = {**STREAM, "last-event-id": chunks[3][0]}
    rest = events((await http.post(PATH, json=asked, headers=headers)).text)
    had = [token for _, one in chunks[:4] for token in one["choices"][0]["token_ids"]]
    *more, last_again = rest
    assert had + [token for _, one in more for token in one["choices"][0]["token_ids"]] == whole
    assert last_again == parts[-1]


async def test_only_the_last_chunk_of_a_choice_has_an_end(http: httpx.AsyncClient) -> None:
    """Several choices come through a queue, so that a choice may have ended before it is read."""
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 5, "seed": 3, "n": 3}}
    parts = events((await http.post(PATH, json={**body, "stream": True})).text)
    for index in range(3):
        mine = [one["choices"][0] for _, one in parts if one["choices"][0]["index"] == index]
        assert [one["finish_reason"] for one in mine] == [None] * 4 + ["length"]


async def test_without_a_limit_the_answer_fills_the_context(
    http: httpx.AsyncClient, service: OpenAIService
) -> None:
    body = {"token_ids": IDS, "sampling_params": {"ignore_eos": True}}
    reply = (await http.post(PATH, json=body)).json()
    room = service.max_model_len - len(IDS)
    assert len(reply["choices"][0]["token_ids"]) == room


async def test_requests_are_aborted_by_their_ids(http: httpx.AsyncClient, engine: Any) -> None:
    engine.pause_after = (3, asyncio.Event())
    body: Mapping[str, Any] = {"token_ids": IDS, "request_id": "mine"}
    asked = asyncio.create_task(http.post(PATH, json=body))
    while engine.taken < 3:
        await asyncio.sleep(0.01)
    again = await http.post(PATH, json=body)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "request_id")
    reply = await http.post(ABORT, json={"request_ids": ["mine", "unknown"]})
    assert reply.json() == {"aborted": ["mine"]}
    (choice,) = (await asked).json()["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("abort", 3)
    assert len(engine.aborted) == 1


async def test_ids_belong_to_their_tenants(service: OpenAIService, engine: Any) -> None:
    service.edge.keys = ApiKeys.load(["mine", "other"])
    engine.pause_after = (3, asyncio.Event())
    body: Mapping[str, Any] = {"token_ids": IDS, "request_id": "one"}
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:

        def post(key: str, path: str, body: Mapping[str, Any]) -> asyncio.Task[httpx.Response]:
            headers = {"Authorization": f"Bearer {key}"}
            return asyncio.create_task(http.post(path, json=body, headers=headers))

        asked = {key: post(key, PATH, body) for key in ("mine", "other")}
        while engine.taken < 6:
            await asyncio.sleep(0.01)
        for ended, (key, answer) in enumerate(asked.items(), 1):
            reply = await post(key, ABORT, {"request_ids": ["one"]})
            assert reply.json() == {"aborted": ["one"]}
            assert (await answer).json()["choices"][0]["finish_reason"] == "abort"
            reply = await post(key, ABORT, {"request_ids": ["one"]})
            assert reply.json() == {"aborted": []}
            assert len(engine.aborted) == ended


async def test_one_of_two_with_the_same_id_runs(http: httpx.AsyncClient) -> None:
    body = {"token_ids": IDS, "request_id": "mine"}
    both = await asyncio.gather(*(http.post(PATH, json=body) for _ in range(2)))
    assert sorted(answer.status_code for answer in both) == [200, 400]


async def test_settings_that_are_none_are_named(http: httpx.AsyncClient) -> None:
    body = {"token_ids": IDS, "foo": 1, "sampling_params": {"tempurature": 2}}
    answer = await http.post(PATH, json=body)
    assert answer.headers["x-rayfin-ignored-fields"] == "foo,tempurature"


async def test_several_ingresses_abort_nothing(
    http: httpx.AsyncClient, service: OpenAIService
) -> None:
    service.settings = {"ingress_replicas": 2}
    response = await http.post(ABORT, json={"request_ids": ["mine"]})
    assert response.status_code == 400
    assert "/admin" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, 10**6]}, "token_ids"),
        ({"token_ids": [1, "a"]}, "token_ids[1]"),
        ({"token_ids": [5] * 200}, "token_ids"),
        ({"prompt": "hello"}, "prompt"),
        ({"features": {"mm": 1}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"stream": True}}, "sampling_params"),
        ({"sampling_params": {"prompt_embeds": "x"}}, "sampling_params"),
        ({"output_mode": "pictures"}, "output_mode"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
async def test_what_is_refused(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await http.post(PATH, json={"token_ids": IDS, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_quotas_and_priorities_hold(http: httpx.AsyncClient, service: OpenAIService) -> None:
    service.edge = replace(service.edge, priority_tenants=frozenset({"vip"}))
    response = await http.post(PATH, json={"token_ids": IDS, "priority": 1})
    assert response.status_code == 403
