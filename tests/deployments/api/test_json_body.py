"""Fields of the two routes that change what is asked of the engine, one by one."""

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello world of tokens"},
    "/v1/chat/completions": {"messages": USER},
}


@pytest.fixture(params=BODIES)
def ask(request: pytest.FixtureRequest, http: httpx.AsyncClient) -> Any:
    async def post(**fields: Any) -> dict[str, Any]:
        reply = await http.post(request.param, json={**BODIES[request.param], **fields})
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    return post


async def test_sampling_settings_reach_the_runner(ask: Any, engine: Any) -> None:
    await ask(
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={"5": 100, "6": -1},
        allowed_token_ids=[9, 5, 5],
        bad_words=["hello"],
        seed=3,
        min_tokens=2,
    )
    own = engine.seen[0].sampling
    assert (own.presence_penalty, own.frequency_penalty, own.repetition_penalty) == (
        0.5,
        -0.5,
        1.25,
    )
    assert own.logit_bias == ((5, 100.0), (6, -1.0)) and own.allowed == (5, 9)
    assert own.bad_words and own.seed == 3 and own.banned_until == len(engine.seen[0].prompt) + 2


async def test_none_is_left_out(ask: Any, engine: Any) -> None:
    names = ["presence_penalty", "logit_bias", "allowed_token_ids", "bad_words", "cache_salt"]
    names += ["truncate_prompt_tokens", "truncation_side", "logprobs", "request_id", "seed"]
    await ask(**dict.fromkeys(names))
    await ask(seed=-1, logit_bias={}, bad_words=[])
    for request in engine.seen:
        assert request.sampling.logit_bias == () and request.extra_keys == ()


@pytest.mark.parametrize("side", [None, "left", "right"])
async def test_truncation(ask: Any, engine: Any, side: str | None) -> None:
    await ask()
    reply = await ask(truncate_prompt_tokens=3, truncation_side=side)
    whole, cut = (request.prompt.tolist() for request in engine.seen)
    assert cut == (whole[:3] if side == "right" else whole[-3:])
    assert reply["usage"]["prompt_tokens"] == 3


async def test_truncation_to_what_fits(http: httpx.AsyncClient, engine: Any) -> None:
    body = {"prompt": "a " * 50_000, "truncate_prompt_tokens": -1, "max_tokens": 28, "echo": True}
    reply = (await http.post("/v1/completions", json=body)).json()
    assert len(engine.seen[0].prompt) == 100
    assert reply["choices"][0]["text"].startswith(" a a") or "a a" in reply["choices"][0]["text"]


async def test_salts(ask: Any, engine: Any) -> None:
    for salt in (None, "a", "b", "a"):
        await ask(cache_salt=salt)
    keys = [request.extra_keys for request in engine.seen]
    assert keys[0] == () and keys[1] == keys[3] != keys[2]


async def test_a_label_is_the_end_of_the_id_and_nothing_else(ask: Any, engine: Any) -> None:
    first, second = await ask(request_id="mine-1"), await ask(request_id="mine-1")
    assert first["id"] == second["id"] and first["id"].endswith("-mine-1")
    assert len({request.request_id for request in engine.seen}) == 2
    assert not any("mine" in request.request_id for request in engine.seen)


@pytest.mark.parametrize("form", ["text", "ids", "dict", "dict of ids"])
@pytest.mark.parametrize("listed", [False, True])
async def test_prompts_in_every_form(
    http: httpx.AsyncClient, engine: Any, tokenizer: Tokenizer, form: str, listed: bool
) -> None:
    ids = tokenizer.encode("hello world")
    prompt: Any = {
        "text": "hello world",
        "ids": ids,
        "dict": {"prompt": "hello world"},
        "dict of ids": {"prompt_token_ids": ids, "cache_salt": "s"},
    }[form]
    body = {"prompt": [prompt, prompt] if listed else prompt, "echo": True, "max_tokens": 1}
    reply = (await http.post("/v1/completions", json=body)).json()
    assert [request.prompt.tolist() for request in engine.seen] == [ids] * (1 + listed)
    assert all(choice["text"].startswith("hello world") for choice in reply["choices"])
    assert all(bool(request.extra_keys) == (form == "dict of ids") for request in engine.seen)


async def test_the_models_own_defaults(
    service: OpenAIService, http: httpx.AsyncClient, engine: Any
) -> None:
    """They give way to the request, and so does the limit that the route has of its own."""
    service.sampling_defaults.update(repetition_penalty=1.5, temperature=0.25, max_tokens=5)
    for fields in ({}, {"repetition_penalty": 1.0, "max_tokens": 3}, {"max_tokens": 50}):
        await http.post("/v1/chat/completions", json={"messages": USER, **fields})
    assert [request.sampling.repetition_penalty for request in engine.seen] == [1.5, 1.0, 1.5]
    assert [request.stopping.max_tokens for request in engine.seen] == [5, 3, 50]
    assert {request.sampling.temperature for request in engine.seen} == {0.25}
    await http.post("/v1/completions", json={"prompt": "hello"})
    assert engine.seen[-1].stopping.max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_echoes_the_message_that_it_goes_on_with(
    openai: AsyncOpenAI, http: httpx.AsyncClient, stream: bool
) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    extra = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    body = {"messages": messages, "max_tokens": 4, "stream": stream, **extra}
    response = await http.post("/v1/chat/completions", json=body)
    if stream:
        events = [line for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(event[6:])["choices"][0] for event in events]
        said = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    else:
        said = response.json()["choices"][0]["message"]["content"]
    assert said.startswith("Well, ") and len(said) > len("Well, ")


async def test_whose_message_it_is(http: httpx.AsyncClient) -> None:
    """Without a turn of the model's, the answer is more of the last message, as in vLLM."""
    body = {"messages": USER, "add_generation_prompt": False, "echo": True, "max_tokens": 2}
    message = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert message["role"] == "user" and message["content"].startswith("hello")
    body = {"messages": USER, "echo": True, "max_tokens": 2}
    message = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert message["role"] == "assistant" and not message["content"].startswith("hello")


async def test_a_response_has_its_salt(http: httpx.AsyncClient, engine: Any) -> None:
    await http.post("/v1/responses", json={"input": "hello", "cache_salt": "s"})
    reply = await http.post("/v1/responses", json={"input": "hello", "cache_salt": "/"})
    assert len(engine.seen) == 1 and engine.seen[0].extra_keys
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("lease", [1, 2, 7])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_stream_interval(
    http: httpx.AsyncClient, engine: Any, path: str, lease: int, logprobs: bool
) -> None:
    """Chunks of so many tokens; together they say what single ones do."""
    engine.lease = lease
    body: dict[str, Any] = {**BODIES[path], "max_tokens": 45, "n": 2, "stream": True, "seed": 3}
    body |= {"return_token_ids": True, "temperature": 1}
    if logprobs:
        body["logprobs"] = 2 if path == "/v1/completions" else True
    said: list[dict[int, tuple[Any, ...]]] = []
    for interval in (None, 5):
        reply = await http.post(path, json={**body, "stream_interval": interval})
        lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line[6:])["choices"][0] for line in lines]
        said.append({index: together(choices, index) for index in (0, 1)})
        for index in (0, 1):
            counts = [len(c.get("token_ids") or ()) for c in choices if c["index"] == index]
            first, *rest = [count for count in counts if count]
            assert first == lease and sum(counts) == 45
            if interval is not None:
                assert all(interval <= count < interval + lease for count in rest[:-1])
                assert len(rest) > 1
    assert said[0] == said[1]


def together(choices: list[dict[str, Any]], index: int) -> tuple[Any, ...]:
    """Text, tokens, tokens with log probabilities, and the reasons of one choice."""
    own = [choice for choice in choices if choice["index"] == index]
    texts = [c["text"] if "text" in c else c["delta"].get("content") or "" for c in own]
    reported = [c["logprobs"] or {} for c in own]
    return (
        "".join(texts),
        [token for c in own for token in c.get("token_ids") or ()],
        [entry for one in reported for entry in one.get("tokens", one.get("content", ()))],
        [offset for one in reported for offset in one.get("text_offset", ())],
        [c["finish_reason"] for c in own if c["finish_reason"]],
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_text(http: httpx.AsyncClient, tokenizer: Tokenizer, stream: bool) -> None:
    body = {"messages": USER, "return_prompt_text": True, "stream": stream, "max_tokens": 3}
    reply = await http.post("/v1/chat/completions", json=body)
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    if not stream:
        assert reply.json()["prompt_text"] == expected
        return
    lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
    texts = [json.loads(line[6:]).get("prompt_text") for line in lines]
    assert texts == [expected, *[None] * (len(texts) - 1)]


async def test_top_p_zero_is_the_likeliest_token(http: httpx.AsyncClient, engine: Any) -> None:
    """Row 93 of the list of bad inputs."""
    body = {"prompt": "hello", "max_tokens": 2, "temperature": 1, "top_p": 0, "top_k": 40}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert (engine.seen[-1].sampling.top_k, engine.seen[-1].sampling.top_p) == (1, 1.0)
