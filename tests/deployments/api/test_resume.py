"""Streams that broke off anywhere and are continued: every event comes once."""

import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rayfin.actors.messages import TokenLog

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60, "stream": True}
TEXT = {"prompt": "Hello", "max_tokens": 60, "stream": True}
USAGE = {"stream_options": {"include_usage": True}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat with two choices and usage": ("/v1/chat/completions", {**CHAT, "n": 2, **USAGE}),
    "chat with ids": ("/v1/chat/completions", {**CHAT, "return_token_ids": True, **USAGE}),
    "chat with log probabilities": ("/v1/chat/completions", {**CHAT, "logprobs": True}),
    "chat that stops": ("/v1/chat/completions", {**CHAT, "stop": ["END"]}),
    "chat that echoes": (
        "/v1/chat/completions",
        {
            **CHAT,
            "messages": [*CHAT["messages"], {"role": "assistant", "content": "Sure"}],  # type: ignore[misc]
            "echo": True,
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    "chat in groups": ("/v1/chat/completions", {**CHAT, "stream_interval": 4}),
    "text": ("/v1/completions", TEXT),
    "text in groups": ("/v1/completions", {**TEXT, "stream_interval": 5, "return_token_ids": True}),
    "texts": ("/v1/completions", {**TEXT, "prompt": ["a", "b"], "n": 2, **USAGE}),
    "text with echo and log probabilities": (
        "/v1/completions",
        {**TEXT, "echo": True, "logprobs": 2, "return_token_ids": True},
    ),
    "text without end": ("/v1/completions", {**TEXT, "ignore_eos": True, "max_tokens": 7}),
}
UNKNOWN = "cmpl-" + 32 * "0"


def events_of(text: str) -> list[tuple[str, str]]:
    """(id, data) of every event; an event without an id has ""."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("id", ""), fields["data"]))
    return found


async def ask(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], last: str | None = None
) -> list[tuple[str, str]]:
    headers = {"Accept": "text/event-stream"} if last is None else {"Last-Event-ID": last}
    reply = await http.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return events_of(reply.text)


def news(events: list[tuple[str, str]]) -> list[Any]:
    """What the events say, log probabilities and usage included; texts of a choice joined."""
    said: list[Any] = []
    for _, data in events:
        said.append(data if data == "[DONE]" else json.loads(data))
    return said


def by_choice(events: list[tuple[str, str]]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for event in news(events):
        for choice in event["choices"] if isinstance(event, dict) else ():
            found.setdefault(choice["index"], []).append(choice)
    return found


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("lease", [1, 3])
async def test_every_event_once(
    http: httpx.AsyncClient, engine: Any, kind: str, lease: int
) -> None:
    """Wherever it broke off, before the engine was done with it or after."""
    path, body = BODIES[kind]
    engine.lease = lease
    whole = await ask(http, path, body)
    logs = dict(engine.logs)
    assert whole[-1] == ("", "[DONE]")
    ids = [event_id for event_id, _ in whole if event_id]
    assert len(set(ids)) == len(ids) > 2
    for at in {*range(0, len(whole), 7), 1, len(whole) - 2}:
        last = whole[at][0]
        if not last:  # [DONE], or the first half of a beginning
            continue
        rest = await ask(http, path, body, last)
        head = whole[: at + 1]
        assert {data["id"] for data in news(head + rest)[:-1]} == {news(whole)[0]["id"]}
        assert {data["created"] for data in news(head + rest)[:-1]} == {news(whole)[0]["created"]}
        reported, expected = by_choice(head + rest), by_choice(whole)
        assert reported.keys() == expected.keys()
        for index, choices in expected.items():
            _assert_same(reported[index], choices)
        if "stream_options" in body:
            usage = [e["usage"] for e in news(head + rest)[:-1] if e.get("usage")]
            assert usage == [e["usage"] for e in news(whole)[:-1] if e.get("usage")]
        assert news(head + rest).count("[DONE]") == 1
        engine.logs = dict(logs)


@pytest.mark.parametrize("kind", BODIES)
async def test_engine_goes_on(http: httpx.AsyncClient, engine: Any, kind: str) -> None:
    """It had not finished: the engine is a little ahead of the client."""
    path, body = BODIES[kind]
    whole = await ask(http, path, body)
    logs: dict[str, TokenLog] = dict(engine.logs)
    for at in range(0, len(whole) - 1, 5):
        last = whole[at][0]
        marks = [int(n) for n in re.findall(r"\d+(?!.*:)", last.partition(":")[2])]
        if not marks:
            continue
        engine.logs = {
            name: TokenLog(log.receipt, log.seed, log.tokens[: max(marks) + 2], None)
            for name, log in logs.items()
            if len(log.tokens) > max(marks) + 2
        }
        if len(engine.logs) < len(logs):
            continue
        engine.seen.clear()
        rest = await ask(http, path, body, last)
        assert all(request.output for request in engine.seen) or 0 in marks
        assert {request.sampling.seed for request in engine.seen} <= {
            log.seed for log in logs.values()
        }
        reported, expected = by_choice(whole[: at + 1] + rest), by_choice(whole)
        for index, choices in expected.items():
            _assert_same(reported[index], choices)


@pytest.mark.parametrize(
    ("kind", "fixed"), [*((kind, {"seed": 7}) for kind in BODIES), ("text", {"temperature": 0})]
)
async def test_an_engine_that_died_with_its_log_is_made_up_for(
    http: httpx.AsyncClient, engine: Any, kind: str, fixed: dict[str, int]
) -> None:
    """Tokens that follow from the body are computed again, and those that were sent left out."""
    path, body = BODIES[kind]
    body = {**body, **fixed}
    engine.lease = 3
    whole = await ask(http, path, body)
    for at in {*range(0, len(whole), 7), 1}:
        last = whole[at][0]
        if not last or last.endswith(":end"):
            continue
        engine.logs.clear()
        engine.seen.clear()
        rest = await ask(http, path, body, last)
        reported, expected = by_choice(whole[: at + 1] + rest), by_choice(whole)
        assert reported.keys() == expected.keys()
        for index, choices in expected.items():
            _assert_same(reported[index], choices)
        keys = [request.key for request in engine.seen]
        assert len(set(keys)) == len(keys)


async def test_other_weights_make_up_for_nothing(http: httpx.AsyncClient, engine: Any) -> None:
    """They may give other tokens than those that the client has."""
    body = {**TEXT, "seed": 7}
    whole = await ask(http, "/v1/completions", body)
    engine.logs.clear()
    deltas = engine._deltas
    engine._deltas = lambda request: (replace(own, weights="step-1") for own in deltas(request))
    headers = {"Last-Event-ID": whole[3][0]}
    reply = await http.post("/v1/completions", json=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "stream_not_found")


async def test_more_than_the_body_leads_to_was_never_told(
    http: httpx.AsyncClient, engine: Any
) -> None:
    headers = {"Last-Event-ID": f"{UNKNOWN}:61"}
    reply = await http.post("/v1/completions", json={**TEXT, "seed": 7}, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "stream_not_found")


async def test_a_resumed_stream_can_be_resumed(http: httpx.AsyncClient, engine: Any) -> None:
    whole = await ask(http, "/v1/completions", TEXT)
    ((name, log),) = engine.logs.items()
    engine.logs[name] = TokenLog(log.receipt, log.seed, log.tokens[:12])
    second = await ask(http, "/v1/completions", TEXT, whole[3][0])
    third = await ask(http, "/v1/completions", TEXT, second[2][0])
    _assert_same(by_choice(whole[:4] + second[:3] + third)[0], by_choice(whole)[0])


async def test_who_is_refused(http: httpx.AsyncClient, engine: Any) -> None:
    whole = await ask(http, "/v1/completions", TEXT)
    last = whole[3][0]

    async def refusal(event_id: str, body: dict[str, Any]) -> tuple[int, str, str]:
        reply = await http.post("/v1/completions", json=body, headers={"Last-Event-ID": event_id})
        error = reply.json()["error"]
        return reply.status_code, error["code"], error["param"]

    for wrong in ("7", "", last + "x", "chatcmpl" + last[4:], f"{UNKNOWN}:1,,é".encode()):
        assert await refusal(wrong, TEXT) == (400, "invalid_value", "last-event-id"), wrong
    assert await refusal(f"{UNKNOWN}:3", TEXT) == (404, "stream_not_found", "last-event-id")
    assert await refusal(last, {**TEXT, "max_tokens": 59}) == (
        400,
        "invalid_value",
        "last-event-id",
    )
    assert await refusal(f"{last},4", TEXT) == (400, "invalid_value", "last-event-id")
    name = last.partition(":")[0]
    assert await refusal(f"{name}:999", TEXT) == (404, "stream_not_found", "last-event-id")
    engine.logs.clear()
    assert await refusal(last, TEXT) == (404, "stream_not_found", "last-event-id")


async def test_an_answer_that_is_no_stream_starts_anew(
    http: httpx.AsyncClient, engine: Any
) -> None:
    body = {**TEXT, "stream": False}
    reply = await http.post("/v1/completions", json=body, headers={"Last-Event-ID": "7"})
    assert reply.status_code == 200 and not engine.logs


@pytest.mark.parametrize("accept", ["*/*", "application/json"])
async def test_who_asks_for_no_event_stream_gets_data_only(
    http: httpx.AsyncClient, engine: Any, accept: str
) -> None:
    """As vLLM's load generator, which takes all behind "data: " for JSON."""
    for path, body in BODIES.values():
        body = {**body, "stream_options": {"include_usage": True}}
        text = (await http.post(path, json=body, headers={"Accept": accept})).text
        *chunks, done = text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        assert all(json.loads(chunk.removeprefix("data: ")) for chunk in chunks)
    assert not engine.logs  # the rest cannot be requested


async def test_openai_package_reads_on_as_before(http: httpx.AsyncClient, openai: Any) -> None:
    stream = await openai.completions.create(model="tiny", **TEXT)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    whole = await ask(http, "/v1/completions", TEXT)
    assert text == "".join(choice["text"] for choice in by_choice(whole)[0])


def _assert_same(reported: list[Any], expected: list[Any]) -> None:
    """The same text, ids and log probabilities, and one end; pieces may be cut differently."""
    assert _joined(reported) == _joined(expected)


def _joined(choices: list[Any]) -> dict[str, Any]:
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice.get("logprobs") or {}).items():
            logprobs.setdefault(name, []).extend(values or [])
    return {
        "text": "".join(_text(choice) for choice in choices),
        "roles": [r for choice in choices if (r := choice.get("delta", {}).get("role"))],
        "ids": [token for choice in choices for token in choice.get("token_ids") or []],
        "ends": ends,
        "stops": [choice["stop_reason"] for choice in choices if choice.get("stop_reason")],
        "logprobs": logprobs,
        "last": choices[-1]["finish_reason"],
    }


def _text(choice: Any) -> str:
    return (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
