"""The keys of answers and of chunks are those of vLLM's, field by field."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

import vllm_shapes as shapes
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.formats import REASONING_FORMATS, TOOL_FORMATS

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 90}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ANSWER = (
    '<think>I think.</think>Look: <tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
)
RICH = {"return_token_ids": True, "prompt_logprobs": 1}
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "stop": "END"},
    {"logprobs": True, "top_logprobs": 2, "return_prompt_text": True, **RICH},
]
TEXTS: list[dict[str, Any]] = [{}, {"n": 2, "stop": "END"}, {"logprobs": 2, "echo": True, **RICH}]
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


async def stream(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = (await http.post(path, json={**body, "stream": True})).text
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture
def parsed(service: OpenAIService, engine: Any, tokenizer: Any) -> None:
    """A model whose calls and thoughts are known, and that says ANSWER."""
    formats = Detected(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
    service.formats, service.max_model_len = formats, 2048
    engine.limits = replace(engine.limits, max_model_len=2048)
    engine.reply = tokenizer.encode(ANSWER, False)


@pytest.mark.parametrize("metrics", [False, True])
async def test_whole_answers(
    http: httpx.AsyncClient, service: OpenAIService, metrics: bool
) -> None:
    service.replies = replace(service.replies, metrics=metrics)
    for fields in CHATS:
        reply = (await http.post(CHAT, json={**HELLO, **fields})).json()
        shapes.check(reply, shapes.CHAT)
        assert (reply["metrics"] is None) == (not metrics or "n" in fields)
    for fields in TEXTS:
        reply = (await http.post(TEXT, json={"prompt": "hello", "max_tokens": 90, **fields})).json()
        shapes.check(reply, shapes.COMPLETION)
        assert (reply["metrics"] is None) == (not metrics or "n" in fields)


@pytest.mark.usefixtures("parsed")
async def test_answers_with_calls_and_thoughts(http: httpx.AsyncClient) -> None:
    body = {**HELLO, "tools": [TOOL], "max_tokens": 500}
    reply = (await http.post(CHAT, json=body)).json()
    shapes.check(reply, shapes.CHAT)
    message = reply["choices"][0]["message"]
    assert message["reasoning"] and message["tool_calls"]
    got = await stream(http, CHAT, {**body, "stream_options": OPTIONS})
    check_chat(got, continuous=True)
    thought = [c["usage"]["completion_tokens_details"]["reasoning_tokens"] for c in got[:-1]]
    assert thought == sorted(thought) and thought[0] == 0 < thought[-1]


def check_chat(got: list[dict[str, Any]], continuous: bool) -> None:
    """Checks the chunks of one choice, and the usage chunk behind them."""
    *chunks, last = got
    for number, chunk in enumerate(chunks):
        ended = chunk["choices"][0]["finish_reason"] is not None
        place = "first" if number == 0 else "last" if ended else "middle"
        shapes.check(chunk, shapes.chat_chunk(place, continuous))
    shapes.check(last, shapes.usage_chunk("chat.completion.chunk"))


@pytest.mark.parametrize("continuous", [False, True])
async def test_streams(http: httpx.AsyncClient, continuous: bool) -> None:
    options = {"stream_options": {**OPTIONS, "continuous_usage_stats": continuous}}
    for fields in CHATS:
        body = {**HELLO, **options, **fields, "n": 1, "prompt_logprobs": None}
        check_chat(await stream(http, CHAT, body), continuous)
    for fields in TEXTS:
        body = {"prompt": "hello", "max_tokens": 90, **options, **fields, "prompt_logprobs": None}
        *chunks, last = await stream(http, TEXT, body)
        for chunk in chunks:
            shapes.check(chunk, shapes.text_chunk(continuous))
        shapes.check(last, shapes.usage_chunk("text_completion"))


@pytest.mark.parametrize("lease", [1, 3])
async def test_an_event_for_each_step(http: httpx.AsyncClient, engine: Any, lease: int) -> None:
    """Also for tokens that are half a character, or may begin a stop string."""
    engine.lease = lease
    steps = -(-(len(engine.reply) + 1) // lease)
    for stop in (None, "👧 nowhere"):
        body = {"prompt": "hello", "max_tokens": 90, "stop": stop}
        got = await stream(http, TEXT, body)
        assert len(got) == steps and (lease > 1 or "" in [c["choices"][0]["text"] for c in got])
        got = await stream(http, CHAT, {**HELLO, "stop": stop})
        assert len(got) == 1 + steps
        assert all("content" in chunk["choices"][0]["delta"] for chunk in got)


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize("include", [True, False])
async def test_hidden_tokens_have_events(
    http: httpx.AsyncClient, engine: Any, include: bool
) -> None:
    """Marks of thoughts and calls, and thoughts that are left out with all that shows them."""
    body = {**HELLO, "tools": [TOOL], "max_tokens": 500, "include_reasoning": include}
    got = [c["choices"][0] for c in await stream(http, CHAT, {**body, "return_token_ids": True})]
    assert len(got) >= 1 + len(engine.reply) + 1
    sent = [token for choice in got for token in choice["token_ids"] or ()]
    assert sent == ([*engine.reply, engine.eos] if include else [])
    assert include == any("reasoning" in choice["delta"] for choice in got)
    assert {} in [choice["delta"] for choice in got]
    asked = {**body, "logprobs": True, "return_token_ids": True}
    choice = (await http.post(CHAT, json=asked)).json()["choices"][0]
    assert (choice["logprobs"] is None) == (choice["token_ids"] is None) == (not include)


async def test_usage_counts_what_was_sent(http: httpx.AsyncClient, engine: Any) -> None:
    """Of a chunk's choice up to it: nothing in the first chunk of a chat, which has the role."""
    engine.lease = 2
    body = {**HELLO, "max_tokens": 9, "n": 2, "ignore_eos": True, "stream_options": OPTIONS}
    *chunks, last = await stream(http, CHAT, body)
    for index in range(2):
        counts = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in counts] == [0, 2, 4, 6, 8, 9]
        assert {usage["total_tokens"] - usage["completion_tokens"] for usage in counts} == {
            len(engine.seen[0].prompt)
        }
    assert last["usage"]["completion_tokens"] == 18
