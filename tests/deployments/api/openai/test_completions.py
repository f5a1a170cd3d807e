"""/v1/completions through the openai package and through plain HTTP."""

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from rayfin.deployments.generation.service import OpenAIService

pytestmark = pytest.mark.anyio
REPLY = "Sure — here you go: 👩‍👩‍👧 مرحبا.\n\nEND of it"
ALL = {"model": "tiny", "max_tokens": 100}


def chunks(text: str) -> list[dict[str, Any]]:
    events = [event.split("\nid: ")[0] for event in text.removesuffix("\n\n").split("\n\n")]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


async def test_a_whole_completion(openai: AsyncOpenAI, engine: Any) -> None:
    reply = await openai.completions.create(prompt="hello", **ALL)
    choice = reply.choices[0]
    assert reply.id.startswith("cmpl-") and reply.object == "text_completion"
    assert (choice.text, choice.finish_reason, choice.index) == (REPLY, "stop", 0)
    assert choice.model_dump()["stop_reason"] is None
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(engine.reply) + 1  # the end of sequence counts
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 2
    assert engine.aborted == [] and engine.open == set()


@pytest.mark.parametrize("lease", [1, 3, 50])
async def test_a_stream_joins_to_the_whole(openai: AsyncOpenAI, engine: Any, lease: int) -> None:
    engine.lease = lease
    stream = await openai.completions.create(
        prompt="hello", stream=True, stream_options={"include_usage": True}, **ALL
    )
    got = [chunk async for chunk in stream]
    texts = [chunk.choices[0].text for chunk in got[:-1]]
    assert "".join(texts) == REPLY and not any("\ufffd" in text for text in texts)
    assert [c.choices[0].finish_reason for c in got[:-1]] == [None] * (len(got) - 2) + ["stop"]
    assert got[-1].choices == [] and got[-1].usage.completion_tokens == len(engine.reply) + 1


async def test_the_default_limit_is_sixteen_tokens(http: httpx.AsyncClient) -> None:
    reply = (await http.post("/v1/completions", json={"prompt": "hello"})).json()
    assert reply["model"] == "org/tiny"
    assert reply["usage"]["completion_tokens"] == 16
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["logprobs"] is reply["choices"][0]["token_ids"] is None


async def test_several_prompts_and_choices_run_together(
    http: httpx.AsyncClient, engine: Any
) -> None:
    engine.delay = 0.002
    body = {"prompt": ["hello", "world of"], "n": 3, "max_tokens": 5, "seed": 7, "echo": True}
    reply = (await http.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert {choice["text"][:5] for choice in reply["choices"][:3]} == {"hello"}
    assert {choice["text"][:8] for choice in reply["choices"][3:]} == {"world of"}
    prompts = [len(request.prompt) for request in engine.seen]
    assert reply["usage"]["prompt_tokens"] == prompts[0] + prompts[3]
    assert [request.sampling.seed for request in engine.seen] == [7, 8, 9] * 2
    assert len({request.request_id for request in engine.seen}) == 6


async def test_several_choices_in_a_stream(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["hello", "world"], "n": 2, "max_tokens": 60, "stream": True, "echo": True}
    texts = {i: "" for i in range(4)}
    for chunk in chunks((await http.post("/v1/completions", json=body)).text):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == ["hello" + REPLY] * 2 + ["world" + REPLY] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("extra", "text", "reason"),
    [
        ({"stop": "\n\n"}, REPLY.partition("\n\n")[0], "\n\n"),
        ({"stop": ["END", " of"]}, REPLY.partition("END")[0], "END"),
        ({"stop": ["END"], "include_stop_str_in_output": True}, REPLY[:-6], "END"),
        ({"stop": "nowhere"}, REPLY, None),
        ({"stop": "👧"}, REPLY.partition("👧")[0], "👧"),
    ],
)
async def test_stop_strings_end_and_abort(
    http: httpx.AsyncClient, engine: Any, stream: bool, extra: Any, text: str, reason: Any
) -> None:
    body = {"prompt": "hello", "max_tokens": 90, "stream": stream, **extra}
    response = await http.post("/v1/completions", json=body)
    replies = chunks(response.text) if stream else [response.json()]
    assert "".join(reply["choices"][0]["text"] for reply in replies) == text
    last = replies[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)
    assert len(engine.aborted) == (reason is not None) and not engine.open


async def test_a_stop_token_is_named(http: httpx.AsyncClient, engine: Any) -> None:
    token = engine.reply[4]
    body = {"prompt": "hello", "stop_token_ids": [token], "return_token_ids": True}
    choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    assert choice["token_ids"] == engine.reply[: engine.reply.index(token) + 1]
    assert choice["prompt_token_ids"] == engine.seen[0].prompt.tolist()


async def test_token_ids_in_a_stream(http: httpx.AsyncClient, engine: Any) -> None:
    body = {"prompt": [5, 6], "max_tokens": 90, "stream": True, "return_token_ids": True}
    choices = [
        c["choices"][0] for c in chunks((await http.post("/v1/completions", json=body)).text)
    ]
    assert [token for choice in choices for token in choice["token_ids"]] == [
        *engine.reply,
        engine.eos,
    ]
    assert [c.get("prompt_token_ids") for c in choices] == [[5, 6]] + [None] * (len(choices) - 1)


async def test_usage_in_every_chunk(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "stream": True, "stream_options": options}
    counts = [
        chunk["usage"]["completion_tokens"]
        for chunk in chunks((await http.post("/v1/completions", json=body)).text)
    ]
    assert counts == sorted(counts) and counts[-1] == 16


async def test_what_reaches_the_engine(
    http: httpx.AsyncClient, engine: Any, service: OpenAIService, tokenizer: Any
) -> None:
    service.sampling_defaults = {"temperature": 0.6, "top_k": 20}
    body = {"prompt": "hi <|im_end|>", "top_k": -1, "min_p": 0.1, "priority": 3, "min_tokens": 2}
    await http.post("/v1/completions", json={**body, "max_tokens": 128, "ignore_eos": True})
    await http.post("/v1/completions", json=body)
    first, second = engine.seen
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.min_p) == (0.6, 0, 0.1)
    assert first.stopping.max_tokens == 128 - len(first.prompt) and first.priority == 3
    assert first.stopping.stop_token_ids == frozenset()
    assert second.stopping.eos_token_ids == second.stopping.stop_token_ids == {engine.eos}
    assert second.sampling.banned == (engine.eos,)
    assert second.sampling.banned_until == len(second.prompt) + 2
    assert engine.eos in first.prompt  # special tokens are parsed in raw prompts


async def test_the_last_place_of_the_context(http: httpx.AsyncClient) -> None:
    body = {"prompt": [5] * 127, "max_tokens": 100}
    reply = (await http.post("/v1/completions", json=body)).json()
    assert reply["usage"]["completion_tokens"] == 1


async def test_ignored_fields_are_named(http: httpx.AsyncClient) -> None:
    body = {"prompt": "hello", "foo": 1, "metadata": {}, "b\r\nx: y": 2}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-rayfin-ignored-fields"] == "foo,metadata,?"
