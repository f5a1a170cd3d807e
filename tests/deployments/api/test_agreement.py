"""Whole and streamed answers of every route are the same text, tokens and reason."""

import json
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio
REPLY = "Sure — here you go: 👩‍👩‍👧 مرحبا.\n\nEND of it"
HELLO = [{"role": "user", "content": "hello"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 90},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 90},
    "/v1/responses": {"input": "hello", "max_output_tokens": 90},
    "/v1/messages": {"messages": HELLO, "max_tokens": 90},
}
LEASES = [1, 2, 3, 7, 50]  # tokens in a delta
Answer = tuple[str, Any, Any]


def whole(path: str, reply: Any) -> Answer:
    """Text, usage, and why it ended."""
    if path == "/v1/completions":
        choice = reply["choices"][0]
        return choice["text"], reply["usage"], (choice["finish_reason"], choice["stop_reason"])
    if path == "/v1/chat/completions":
        choice = reply["choices"][0]
        reason = (choice["finish_reason"], choice["stop_reason"])
        return choice["message"]["content"], reply["usage"], reason
    if path == "/v1/responses":
        return reply["output"][0]["content"][0]["text"], reply["usage"], reply["status"]
    reason = (reply["stop_reason"], reply["stop_sequence"])
    return reply["content"][0]["text"], reply["usage"]["output_tokens"], reason


def pieces(path: str, events: list[Any]) -> tuple[list[str], Any, Any]:
    """The same of a stream, its text as it came."""
    if path == "/v1/responses":
        text = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        reply = events[-1]["response"]
        return text, reply["usage"], reply["status"]
    if path == "/v1/messages":
        text = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
        (last,) = [event for event in events if event["type"] == "message_delta"]
        reason = (last["delta"]["stop_reason"], last["delta"]["stop_sequence"])
        return text, last["usage"]["output_tokens"], reason
    *chunks, last = events
    choices = [chunk["choices"][0] for chunk in chunks]
    if path == "/v1/completions":
        text = [choice["text"] for choice in choices]
    else:
        text = [choice["delta"].get("content") or "" for choice in choices]
    reason = (choices[-1]["finish_reason"], choices[-1]["stop_reason"])
    return text, last["usage"], reason


def counted(usage: Any) -> Any:
    """A usage without the keys that are null: a stream leaves them out."""
    if not isinstance(usage, dict):
        return usage
    return {name: counted(value) for name, value in usage.items() if value is not None}


async def ask(http: httpx.AsyncClient, path: str, **fields: Any) -> Answer:
    """The answer to both forms of the request, which must be the same one."""
    body = {"model": "tiny", **ROUTES[path], **fields}
    answer = whole(path, (await http.post(path, json=body)).raise_for_status().json())
    if path.endswith("completions"):
        body["stream_options"] = {"include_usage": True}
    stream = (await http.post(path, json={**body, "stream": True})).raise_for_status()
    data = [line[6:] for line in stream.text.splitlines() if line.startswith("data: {")]
    texts, *rest = pieces(path, [json.loads(line) for line in data])
    assert not any("\ufffd" in text for text in texts)
    usage, reason = rest
    assert ("".join(texts), usage, reason) == (answer[0], counted(answer[1]), answer[2])
    return answer


def output_tokens(usage: Any) -> int:
    if isinstance(usage, int):
        return usage
    tokens = usage.get("completion_tokens", usage.get("output_tokens"))
    assert usage["total_tokens"] == tokens + usage.get("prompt_tokens", usage.get("input_tokens"))
    return int(tokens)


@pytest.mark.parametrize("lease", LEASES)
@pytest.mark.parametrize("path", ROUTES)
async def test_every_size_of_chunk(
    http: httpx.AsyncClient, engine: Any, path: str, lease: int
) -> None:
    engine.lease = lease
    text, usage, _ = await ask(http, path)
    assert text == REPLY
    assert output_tokens(usage) == len(engine.reply) + 1  # the end of sequence counts


@pytest.mark.parametrize("lease", LEASES)
@pytest.mark.parametrize("path", ROUTES)
async def test_a_stop_string_never_shows_wherever_tokens_split(
    http: httpx.AsyncClient, engine: Any, tokenizer: Any, path: str, lease: int
) -> None:
    engine.lease = lease
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    for stop in (" — here", "👩‍👧", "\u200d👧 م", "go: ", ".\n\nE", "\n\nEND of it"):
        text, usage, _ = await ask(http, path, **{name: [stop, "nowhere"]})
        assert text == REPLY[: REPLY.index(stop)]
        shown = tokenizer.encode(REPLY[: REPLY.index(stop) + len(stop)], False)
        assert output_tokens(usage) == len(shown)  # to the end of the stop string, no more
