"""The OpenAI API over a real socket, a real engine, and the clients that people use."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from rayfin import LLM, SamplingParams, __version__

PROMPT = "The capital of France is"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
LENGTH = 24
EXACT: dict[str, Any] = {"temperature": 0, "max_tokens": LENGTH}
WHOLE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def completion(solo: LLM) -> str:
    params = SamplingParams(ignore_eos=True, **EXACT)
    return solo.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


@pytest.fixture(scope="module")
def answer(solo: LLM) -> str:
    params = SamplingParams(ignore_eos=True, **EXACT)
    return solo.chat(CHAT, params, use_tqdm=False)[0].outputs[0].text


def test_plain_post(app: Any, http: httpx.Client, greedy: Callable[..., list[int]]) -> None:
    body = {"model": app.model, "prompt": PROMPT, "return_token_ids": True, **WHOLE, **EXACT}
    reply = http.post("/v1/completions", json=body).raise_for_status().json()
    choice = reply["choices"][0]
    assert choice["token_ids"] == greedy(PROMPT, LENGTH)
    assert choice["finish_reason"] == "length"
    assert (reply["object"], reply["model"]) == ("text_completion", app.model)
    usage = reply["usage"]
    assert usage["completion_tokens"] == LENGTH
    assert usage["prompt_tokens"] == len(choice["prompt_token_ids"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + LENGTH


def test_openai_client(app: Any, client: openai.OpenAI, completion: str, answer: str) -> None:
    text = client.completions.create(model=app.model, prompt=PROMPT, extra_body=WHOLE, **EXACT)
    assert text.choices[0].text == completion
    chat = client.chat.completions.create(model=app.model, messages=CHAT, extra_body=WHOLE, **EXACT)
    assert chat.choices[0].message.content == answer
    assert chat.choices[0].message.role == "assistant"
    assert chat.usage is not None and chat.usage.completion_tokens == LENGTH


def test_openai_client_streams(
    app: Any, client: openai.OpenAI, completion: str, answer: str
) -> None:
    common = {
        "model": app.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": WHOLE,
        **EXACT,
    }
    chunks = list(client.completions.create(prompt=PROMPT, **common))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == completion
    assert len(chunks) > 3  # it came in pieces
    assert chunks[-1].usage.completion_tokens == LENGTH
    parts = list(client.chat.completions.create(messages=CHAT, **common))
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == answer
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].usage.completion_tokens == LENGTH


def test_async_openai_client(app: Any, completion: str, answer: str) -> None:
    async def ask() -> tuple[str, str, str]:
        async with openai.AsyncOpenAI(
            base_url=f"{app.url}/v1", api_key="none", max_retries=0
        ) as client:
            text, chat, stream = await asyncio.gather(
                client.completions.create(
                    model=app.model, prompt=PROMPT, extra_body=WHOLE, **EXACT
                ),
                client.chat.completions.create(
                    model=app.model, messages=CHAT, extra_body=WHOLE, **EXACT
                ),
                client.chat.completions.create(
                    model=app.model, messages=CHAT, stream=True, extra_body=WHOLE, **EXACT
                ),
            )
            parts = [part.choices[0].delta.content or "" async for part in stream]
            return text.choices[0].text, chat.choices[0].message.content or "", "".join(parts)

    assert asyncio.run(ask()) == (completion, answer, answer)


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-7", prompt=PROMPT)
    assert error.value.status_code == 404 and error.value.code == "model_not_found"
    assert error.value.param == "model"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_that_cannot_fit(app: Any, client: openai.OpenAI, stream: bool) -> None:
    """Refused with a status, streamed or not."""
    for prompt in ([5] * 100_000, "word " * 100_000):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model=app.model, prompt=prompt, stream=stream)
        assert error.value.code == "context_length_exceeded" and error.value.param == "prompt"


@pytest.mark.parametrize("text", ["{", "", "[]", '{"prompt": "a" "b"}', "\x00", '{"prompt": NaN}'])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_malformed_json(http: httpx.Client, path: str, text: str) -> None:
    reply = http.post(path, content=text, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_refused_setting_is_named(app: Any, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=app.model, prompt=PROMPT, temperature=9)
    assert error.value.param == "temperature"


def test_small_endpoints(app: Any, http: httpx.Client, client: openai.OpenAI) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/version").json() == {"version": __version__}
    assert [model.id for model in client.models.list()] == [app.model]
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/completions").status_code == 405


def test_stop_strings_count_as_stop(app: Any, solo: LLM, client: openai.OpenAI) -> None:
    """The engine gets an abort with its reason."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = solo.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text
    common = {"model": app.model, "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
    before = app.idle().finished
    for stream in (False, True):
        answer = client.completions.create(
            **common, stop=text[10:14], extra_body={"ignore_eos": True}, stream=stream
        )
        last = list(answer)[-1] if stream else answer
        assert last.choices[0].finish_reason == "stop"
    after = app.idle().finished
    grown = {reason: after[reason] - before.get(reason, 0) for reason in after}
    assert {reason: count for reason, count in grown.items() if count} == {"stop": 2}


def test_metrics_add_up(app: Any, client: openai.OpenAI, greedy: Callable[..., list[int]]) -> None:
    """Every request and every token is counted, once."""
    app.idle()
    before = app.samples()
    common = {"model": app.model, "temperature": 0}
    replies = [
        client.completions.create(prompt=PROMPT, max_tokens=n, extra_body=WHOLE, **common)
        for n in (1, 7, 30)
    ]
    replies.append(
        client.chat.completions.create(messages=CHAT, max_tokens=9, extra_body=WHOLE, **common)
    )
    stop = {"stop_token_ids": greedy(PROMPT, 5)[4:], "ignore_eos": True}
    stopped = client.completions.create(prompt=PROMPT, max_tokens=99, extra_body=stop, **common)
    assert stopped.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=PROMPT, max_tokens=0, **common)
    app.idle()
    after = app.samples()
    grown = {
        name.removeprefix("rayfin_"): value - before.get(name, 0) for name, value in after.items()
    }
    everything = [*replies, stopped]
    assert grown["prompt_tokens_total"] == sum(reply.usage.prompt_tokens for reply in everything)
    assert grown["generation_tokens_total"] == sum(
        reply.usage.completion_tokens for reply in everything
    )
    assert sum(reply.usage.completion_tokens for reply in replies) == 1 + 7 + 30 + 9
    reasons = {name: grown[f"request_success_total/{name}"] for name in ("length", "stop")}
    assert reasons == {"length": 4, "stop": 1}
    assert grown["request_success_total/abort"] == grown["request_success_total/error"] == 0
    for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert grown[f"{histogram}_count"] == 5
    assert grown["client_disconnects_total"] == 0
    assert after["rayfin_num_requests_running"] == after["rayfin_num_requests_waiting"] == 0
    assert after["rayfin_kv_cache_usage_perc"] == 0


def test_stop_string_is_no_disconnect(app: Any, client: openai.OpenAI, completion: str) -> None:
    before = app.samples()
    stop = completion[4:8]
    reply = client.completions.create(
        model=app.model, prompt=PROMPT, stop=stop, extra_body=WHOLE, **EXACT
    )
    assert reply.choices[0].text == completion[: completion.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    app.idle()
    after = app.samples()
    for name, more in {
        "client_disconnects_total": 0,
        "e2e_request_latency_seconds_count": 1,
    }.items():
        assert after[f"rayfin_{name}"] - before[f"rayfin_{name}"] == more, name


def test_event_stream_on_the_wire(app: Any, http: httpx.Client) -> None:
    """What curl -N shows to a client that asks for an event stream: events with ids."""
    body = {"model": app.model, "prompt": PROMPT, "stream": True, **WHOLE, **EXACT}
    accept = {"Accept": "text/event-stream"}
    with http.stream("POST", "/v1/completions", json=body, headers=accept) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    *pairs, _ = [line.split(": ", 1) for line in lines]
    assert [name for name, _ in pairs] == ["data", "id"] * (len(pairs) // 2)
    events = [json.loads(value) for name, value in pairs if name == "data"]
    assert len({event["id"] for event in events}) == 1
    assert [bool(event["choices"][0]["finish_reason"]) for event in events] == [
        *[False] * (len(events) - 1),
        True,
    ]
