"""/v1/messages through the anthropic package and through plain HTTP."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from anthropic import (
    AsyncAnthropic,
    AuthenticationError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
)
from starlette.responses import PlainTextResponse

from rayfin.actors.errors import EngineUnavailable, Overloaded, RequestFailed
from rayfin.deployments.api.app import build_api
from rayfin.deployments.http.anthropic_errors import AnthropicErrors
from rayfin.deployments.http.keys import ApiKeys

pytestmark = pytest.mark.anyio
REPLY = "Sure — here you go: 👩‍👩‍👧 مرحبا.\n\nEND of it"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOL = {"name": "f", "input_schema": {}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
USED = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "5"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
REFERENCE = {"type": "tool_reference", "tool_name": "f"}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "hello"}}
TOO_LONG = "prompt is too long: "
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "messages": HELLO}


def conversation(*turns: Any) -> dict[str, Any]:
    """Messages of one block of the user's, or of a list of blocks of the assistant's.

    An assistant's turn has a user's before it.
    """
    messages: list[Any] = []
    for turn in turns:
        if isinstance(turn, list):
            messages += [*HELLO, {"role": "assistant", "content": turn}]
        else:
            messages.append({"role": "user", "content": [turn]})
    return {"messages": messages}


def prompt(tokenizer: Any, *messages: tuple[str, str], **settings: Any) -> list[int]:
    plain = [{"role": role, "content": content} for role, content in messages]
    settings = settings or {"add_generation_prompt": True}
    ids: list[int] = tokenizer.inner.apply_chat_template(plain, return_dict=False, **settings)
    return ids


async def until(condition: Callable[[], Any]) -> None:
    """Lets the others run until it holds; only a failure waits so long."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_a_whole_message(anthropic: AsyncAnthropic, engine: Any, tokenizer: Any) -> None:
    reply = await anthropic.messages.create(
        system="Be brief.",
        metadata={"user_id": "me"},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5},
        **ASKED,
    )
    assert reply.id.startswith("msg_") and reply._request_id
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "org/tiny")
    assert [(block.type, block.text) for block in reply.content] == [("text", REPLY)]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    request = engine.seen[0]
    expected = prompt(tokenizer, ("system", "Be brief."), ("user", "hello"))
    assert request.prompt.tolist() == expected
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert request.stopping.max_tokens == 60
    usage = reply.usage
    created = len(expected) // 4 * 4 - 2  # of whole pages
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (2, created)
    assert usage.input_tokens == len(expected) - 2 - created
    assert usage.output_tokens == len(engine.reply) + 1


async def test_the_events_of_a_stream(
    anthropic: AsyncAnthropic, http: httpx.AsyncClient, engine: Any
) -> None:
    raw = await http.post("/v1/messages", json={**ASKED, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    lines = [event.split("\n") for event in raw.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name.removeprefix("event: ") for name, _ in lines] == [e["type"] for e in events]
    start, ping, block_start, *deltas, block_stop, delta, stop = events
    assert start["type"] == "message_start" and start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    prompt_usage = {**events[-2]["usage"], "output_tokens": 0}
    assert start["message"]["usage"] == prompt_usage and engine.seen[0].timed
    assert block_start == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert (ping, stop) == ({"type": "ping"}, {"type": "message_stop"})
    assert {event["type"] for event in deltas} == {"content_block_delta"} and len(deltas) > 3
    assert "".join(event["delta"]["text"] for event in deltas) == REPLY
    assert block_stop == {"type": "content_block_stop", "index": 0}
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    async with anthropic.messages.stream(**ASKED) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert len(texts) > 3 and "".join(texts) == final.content[0].text == REPLY
    assert final.stop_reason == "end_turn"
    whole = await anthropic.messages.create(**ASKED)
    assert final.usage.output_tokens == whole.usage.output_tokens == delta["usage"]["output_tokens"]
    assert final.usage.input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"stop_sequences": ["zzz", "END"]}, "stop_sequence", "END", REPLY[: REPLY.index("END")]),
        ({"max_tokens": 3}, "max_tokens", None, None),
        ({"max_tokens": 128}, "model_context_window_exceeded", None, None),
        ({}, "end_turn", None, REPLY),
    ],
)
async def test_why_it_stopped(
    anthropic: AsyncAnthropic,
    engine: Any,
    stream: bool,
    fields: Any,
    reason: str,
    sequence: str | None,
    text: str | None,
) -> None:
    if reason == "model_context_window_exceeded":
        engine.eos = engine.reply[0]
    asked = {**ASKED, **fields}
    if stream:
        async with anthropic.messages.stream(**asked) as events:
            reply = await events.get_final_message()
    else:
        reply = await anthropic.messages.create(**asked)
    assert (reply.stop_reason, reply.stop_sequence) == (reason, sequence)
    assert text is None or reply.content[0].text == text


async def test_blocks_and_neighbours(
    anthropic: AsyncAnthropic, engine: Any, tokenizer: Any
) -> None:
    """Blocks are joined, and so are neighbours of one role."""
    system: Any = [
        {"type": "text", "text": t, "cache_control": {"type": "ephemeral"}} for t in "ab"
    ]
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "user", "content": "z"},
        {"role": "assistant", "content": [{"type": "text", "text": "here"}]},
        {"role": "user", "content": "go"},
    ]
    await anthropic.messages.create(model="tiny", max_tokens=2, system=system, messages=messages)
    assert engine.seen[0].prompt.tolist() == prompt(
        tokenizer, ("system", "a\nb"), ("user", "x\ny\nz"), ("assistant", "here"), ("user", "go")
    )


async def test_a_final_assistant_message_is_continued(
    anthropic: AsyncAnthropic, engine: Any, tokenizer: Any
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "here you"}]
    reply = await anthropic.messages.create(**{**ASKED, "messages": messages})
    turns = [("user", "hello"), ("assistant", "here you")]
    expected = prompt(tokenizer, *turns, continue_final_message=True)
    assert engine.seen[0].prompt.tolist() == expected
    assert tokenizer.decode(expected).endswith("here you")
    assert reply.content[0].text == REPLY
    empty = [*HELLO, {"role": "assistant", "content": ""}]
    await anthropic.messages.create(**{**ASKED, "messages": empty})
    assert engine.seen[1].prompt.tolist() == prompt(tokenizer, ("user", "hello"))


async def test_count_tokens(anthropic: AsyncAnthropic, engine: Any, tokenizer: Any) -> None:
    counted = await anthropic.messages.count_tokens(
        model="tiny", system="Be brief.", messages=HELLO
    )
    expected = prompt(tokenizer, ("system", "Be brief."), ("user", "hello"))
    assert counted.input_tokens == len(expected) and engine.seen == []
    long: Any = [{"role": "user", "content": "a b " * 500}]
    counted = await anthropic.messages.count_tokens(model="tiny", messages=long)
    assert counted.input_tokens > 1000  # more than the context holds


async def test_models(anthropic: AsyncAnthropic) -> None:
    listed = [model async for model in anthropic.models.list()]
    assert [model.id for model in listed] == ["org/tiny", "tiny"]
    assert listed[0].type == "model" and listed[0].created_at.tzinfo is not None
    assert (await anthropic.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(NotFoundError) as error:
        await anthropic.models.retrieve("other")
    assert error.value.body["type"] == "error"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "assistant", "content": " "}]}, "messages"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": "f"}, "tools"),
    ({"tools": ["f"]}, "tools[0]"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "name": "a" * 129}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "name": f"f{i}"} for i in range(129)]}, "tools"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "input_schema": []}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description"),
    ({"tools": [{**TOOL, "strict": 1}]}, "tools[0].strict"),
    ({"tools": [{**TOOL, "description": "a" * 2**18}]}, "tools"),
    ({"tools": [{"name": "f", "type": "wish"}]}, "tools[0].type"),
    ({"tools": [SEARCH, {"name": "f"}]}, "tools[1].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {}, "tools": [TOOL]}, "tool_choice.type"),
    ({"tool_choice": {"type": "required"}, "tools": [TOOL]}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice.name"),
    (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "x"}, "tools": [TOOL]},
        "tool_choice.disable_parallel_tool_use",
    ),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "loud"}}, "thinking.type"),
    ({"thinking": {}}, "thinking.type"),
    ({"output_config": {"effort": "enormous"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
    ({"output_config": {"format": "json"}}, "output_config.format"),
    ({"output_config": {"format": SCHEMA}, "output_format": SCHEMA}, "output_format"),
    (conversation({"type": "tool_result", "tool_use_id": "t"}), "messages[0].content[0].tool_use"),
    (conversation({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (
        conversation([USED], {**RESULT, "content": [{"type": "tool_reference"}]}),
        "messages[2].content[0].content[0].tool_name",
    ),
    (
        conversation([USED], {**RESULT, "content": [{**REFERENCE, "tool_name": "x"}]}),
        "messages[2].content[0].content[0].tool_name",
    ),
    (conversation({**DOCUMENT, "source": {"type": "base64"}}), "does not support PDF input"),
    (conversation({**DOCUMENT, "source": {}}), "messages[0].content[0].source.type"),
    (conversation({**DOCUMENT, "source": {"type": "text"}}), "messages[0].content[0].source.data"),
    (conversation(USED), "messages[0].content[0].type"),
    (conversation([USED]), "messages[1].content"),
    (conversation([{**USED, "input": "{}"}], RESULT), "messages[1].content[0].input"),
    (conversation([{**USED, "name": "a b"}], RESULT), "messages[1].content[0].name"),
    (conversation([{**USED, "id": None}], RESULT), "messages[1].content[0].id"),
    (conversation([{"type": "thinking"}], RESULT), "messages[1].content[0].thinking"),
    (conversation([RESULT], RESULT), "messages[1].content[0].type"),
    (conversation([USED], {**RESULT, "tool_use_id": "u"}), "messages[2].content[0].tool_use_id"),
    (conversation([USED], {**RESULT, "is_error": "x"}), "messages[2].content[0].is_error"),
    (conversation([USED], {**RESULT, "content": 5}), "messages[2].content[0].content"),
    (
        conversation([USED], {**RESULT, "content": [{"type": "image"}]}),
        "messages[2].content[0].content[0].type",
    ),
]
BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": "a b " * 200}]}, TOO_LONG),
    ({"messages": [{"role": "user", "content": "a" * 100_000}]}, TOO_LONG),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"temperature": 1.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
    ({"stream": 1}, "stream"),
    ({"thinking": {"type": "enabled", "budget_tokens": 60}}, "thinking.budget_tokens"),
]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_bad_bodies(http: httpx.AsyncClient, engine: Any, path: str) -> None:
    """Anthropic's body has no place for the field: the message names it."""
    for fields, field in BAD + (BAD_SAMPLING if path == "/v1/messages" else []):
        response = await http.post(path, json={**ASKED, **fields})
        assert response.status_code == 400, fields
        body = response.json()
        assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        assert body["error"]["type"] == "invalid_request_error"
        assert field in body["error"]["message"], body
        assert body["request_id"] == response.headers["request-id"]
        assert response.headers["x-request-id"] == body["request_id"]
    assert engine.seen == []


@pytest.mark.parametrize(
    ("error", "kind", "status", "name"),
    [
        (Overloaded("queue is full"), RateLimitError, 429, "rate_limit_error"),
        (EngineUnavailable("starting"), InternalServerError, 503, "overloaded_error"),
        (RequestFailed("row failed"), InternalServerError, 500, "api_error"),
        (OSError("/etc/secret"), InternalServerError, 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_by_the_engine(
    anthropic: AsyncAnthropic,
    engine: Any,
    error: Any,
    kind: Any,
    status: int,
    name: str,
    stream: Any,
) -> None:
    engine.refusal = error
    with pytest.raises(kind) as raised:
        await anthropic.messages.create(**ASKED, stream=stream)
    assert raised.value.status_code == status
    assert raised.value.body["error"]["type"] == name
    assert "secret" not in str(raised.value)
    assert ("retry-after" in raised.value.response.headers) == (status in (429, 503))


@pytest.mark.parametrize("failure", [RequestFailed("row failed"), OSError("/etc/secret")])
async def test_a_failure_in_a_stream_is_its_last_event(
    anthropic: AsyncAnthropic, http: httpx.AsyncClient, engine: Any, failure: Exception
) -> None:
    engine.failure = (3, failure)
    raw = await http.post("/v1/messages", json={**ASKED, "stream": True})
    name, data = raw.text.strip().split("\n\n")[-1].split("\n")
    body = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and body["error"]["type"] == "api_error"
    assert "secret" not in raw.text and not engine.open
    assert body["request_id"] == raw.headers["request-id"]
    stream = await anthropic.messages.create(**ASKED, stream=True)
    with pytest.raises(Exception, match="api_error"):
        async for _ in stream:
            pass


async def test_refusals_before_the_route(http: httpx.AsyncClient) -> None:
    wrong = [
        (await http.get("/v1/messages"), 405, "invalid_request_error"),
        (await http.post("/v1/messages/x", json={}), 404, "not_found_error"),
        (await http.post("/v1/messages", content=b"{}"), 415, "invalid_request_error"),
        (
            await http.post("/v1/messages", content=b"a" * 5 * 2**20),
            413,
            "request_too_large",
        ),
        (
            await http.post("/v1/messages", json={**ASKED, "model": "gpt-7"}),
            404,
            "not_found_error",
        ),
    ]
    for response, status, kind in wrong:
        assert response.status_code == status
        assert response.json()["error"]["type"] == kind
        assert response.json()["request_id"] == response.headers["request-id"]
    assert set((await http.get("/v1/nothing")).json()) == {"error"}


async def test_a_translation_stays_one(service: Any) -> None:
    """A proxy in front may translate too; a refusal in plain text becomes the message."""

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("Disallowed origin", 400)(scope, receive, send)

    for app, message in ((build_api(service), "messages"), (plain, "Disallowed origin")):
        transport = httpx.ASGITransport(AnthropicErrors(AnthropicErrors(app)))
        async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:
            response = await http.post("/v1/messages", json={"max_tokens": 5})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.json()["request_id"] == response.headers["request-id"]


async def test_names_of_tools_are_as_long_as_anthropics(http: httpx.AsyncClient) -> None:
    """Also of earlier calls, and of the one that is chosen."""
    name = "mcp__" + "a" * 123
    use = {"type": "tool_use", "id": "t1", "name": name, "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}
    said = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = {**ASKED, "messages": [*HELLO, *said], "tools": [{**TOOL, "name": name}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-Api-Key": "secret"}, 200),
        ({"Authorization": "Bearer secret"}, 200),
        ({"X-Api-Key": "wrong"}, 401),
        ({"X-Api-Key": b"\xff"}, 401),
        ({}, 401),
        ({"X-Api-Key": "secret", "Authorization": "Bearer secret"}, 200),
        ({"X-Api-Key": "", "Authorization": "Bearer secret"}, 200),
        ({"X-Api-Key": "secret", "Authorization": "Bearer "}, 200),
        ({"X-Api-Key": "secret", "Authorization": ""}, 200),
        ({"X-Api-Key": "secret", "Authorization": "Basic c2VjcmV0"}, 200),  # a gateway's
        ({"X-Api-Key": "wrong", "Authorization": "bearer  secret"}, 200),
        ({"X-Api-Key": "secret", "Authorization": "Bearer wrong"}, 401),
        ({"X-Api-Key": "", "Authorization": ""}, 401),
        ([("X-Api-Key", "secret"), ("X-Api-Key", "wrong")], 400),  # which one counts?
        ([("Authorization", "Bearer secret"), ("Authorization", "Bearer wrong")], 400),
    ],
)
async def test_the_key_may_be_where_anthropic_puts_it(
    service: Any, connect: Any, headers: Any, status: int
) -> None:
    service.edge.keys = ApiKeys.load(["secret"])
    async with connect() as client:
        response = await client.post("/v1/messages", json=ASKED, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "authentication_error"
    if status == 400:
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_the_package_sends_a_key_that_is_known(service: Any, connect: Any) -> None:
    service.edge.keys = ApiKeys.load(["secret"])
    async with connect() as http:
        settings: Any = {"base_url": "http://rayfin", "http_client": http, "max_retries": 0}
        for keys in ({"api_key": "secret"}, {"auth_token": "secret"}):
            reply = await AsyncAnthropic(**keys, **settings).messages.create(**ASKED)
            assert reply.stop_reason == "end_turn"
        with pytest.raises(AuthenticationError):
            await AsyncAnthropic(api_key="wrong", **settings).messages.create(**ASKED)


async def test_leaving_aborts(http: httpx.AsyncClient, engine: Any) -> None:
    for stream in (False, True):
        engine.gate = asyncio.Event()
        asking = asyncio.create_task(http.post("/v1/messages", json={**ASKED, "stream": stream}))
        await until(lambda: engine.open)
        assert (await http.get("/load")).json() == {"server_load": 1}
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not engine.open
    assert len(engine.aborted) == 2
    assert (await http.get("/load")).json() == {"server_load": 0}


async def test_unknown_fields_are_named(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/messages", json={**ASKED, "foo": 1, "service_tier": "auto"})
    assert response.headers["x-rayfin-ignored-fields"] == "foo"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_what_has_no_effect_is_named(http: httpx.AsyncClient, path: str) -> None:
    unread = {
        "context_management": {"edits": []},
        "container": "c",
        "mcp_servers": [{}],
        "thinking": {"type": "enabled", "budget_tokens": 20, "display": "updates"},
        "output_config": {"task_budget": {}, "effort": "low"},
        "tools": [SEARCH],
        "tool_choice": {"type": "tool", "name": "web_search"},
    }
    response = await http.post(path, json={**ASKED, **unread})
    assert response.status_code == 200, response.text
    named = set(response.headers["x-rayfin-ignored-fields"].split(","))
    assert named - {"max_tokens"} == {  # which does not count
        *("context_management", "container", "mcp_servers", "tools.web_search_20250305"),
        *("thinking.budget_tokens", "thinking.display", "output_config.task_budget"),
    }


async def test_a_billing_line_is_left_out(
    http: httpx.AsyncClient, engine: Any, tokenizer: Any
) -> None:
    """Claude Code's differs between sessions: what is behind it would be in no prefix."""
    line = "x-anthropic-billing-header: cc_version=2.1.332.1; cch=5;"
    blocks = [{"type": "text", "text": text} for text in (line, "Be brief.")]
    for system in (blocks, f"{line}\nBe brief."):
        await http.post("/v1/messages", json={**ASKED, "system": system})
        expected = prompt(tokenizer, ("system", "Be brief."), ("user", "hello"))
        assert engine.seen[-1].prompt.tolist() == expected
    await http.post("/v1/messages", json={**ASKED, "system": blocks[:1]})
    assert engine.seen[-1].prompt.tolist() == prompt(tokenizer, ("user", "hello"))


async def test_a_late_message_start_tells_the_truth(
    http: httpx.AsyncClient, engine: Any, service: Any
) -> None:
    """It waits for the first token, which tells how many of the prompt were cached."""
    engine.delay = 0.03
    service.replies = replace(service.replies, comment_seconds=0.01)
    raw = await http.post("/v1/messages", json={**ASKED, "max_tokens": 2, "stream": True})
    events = [text for text in raw.text.split("\n\n") if text and not text.startswith(":")]
    assert raw.text.startswith(": waiting")
    start = json.loads(events[0].partition("data: ")[2])
    assert start["message"]["usage"]["cache_read_input_tokens"] == 2


async def test_head(http: httpx.AsyncClient) -> None:
    assert (await http.head("/")).status_code == 200
