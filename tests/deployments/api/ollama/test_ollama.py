"""Ollama's API: lines of JSON over HTTP, and through the ollama package where it is installed."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rayfin.actors.errors import Overloaded, RequestFailed
from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import EngineInfo
from rayfin.deployments.api.app import build_api
from rayfin.deployments.api.ollama.bodies import OllamaChat
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.text.messages import MAX_TOOLS
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.formats import find_reasoning_format, find_tool_format

pytestmark = pytest.mark.anyio
REPLY = "Sure — here you go: 👩‍👩‍👧 مرحبا.\n\nEND of it"
HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "tiny:latest", "messages": HELLO}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function | tojson }}]{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ enable_thinking }}{% endif %}"
)


@pytest.fixture
def says(engine: Any, service: Any, tokenizer: Any) -> Callable[[str], None]:
    """Makes the model say a text. It writes calls as Hermes does, and thoughts as Qwen."""
    service.formats = Detected(find_tool_format("hermes"), find_reasoning_format("qwen3"))
    service.chat_template = TEMPLATE
    service.max_model_len = 4096
    engine.limits = EngineInfo("engine", 4096, tokenizer.vocab_size, 1000, 4)

    def say(text: str) -> None:
        engine.reply = tokenizer.encode(text, False)

    return say


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_chat(http: httpx.AsyncClient, engine: Any, tokenizer: Any) -> None:
    body = {
        **CHAT,
        "options": {"temperature": 0.5, "top_k": 5, "num_predict": 60, "seed": -1, "num_ctx": 9},
        "keep_alive": "5m",
    }
    answer = await http.post("/api/chat", json=body)
    *deltas, last = lines(answer)
    assert answer.headers["x-rayfin-ignored-fields"] == "options.num_ctx"
    assert "".join(line["message"]["content"] for line in deltas) == REPLY and len(deltas) > 3
    assert {line["model"] for line in deltas} == {"tiny:latest"}
    assert not any(line["done"] for line in deltas)
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last["message"] == {"role": "assistant", "content": ""}
    request = engine.seen[-1]
    assert last["prompt_eval_count"] == len(request.prompt)
    assert last["eval_count"] == len(engine.reply) + 1 and last["total_duration"] > 0
    assert (request.sampling.top_k, request.stopping.max_tokens) == (5, 60)
    expected = tokenizer.inner.apply_chat_template(
        HELLO, add_generation_prompt=True, return_dict=False
    )
    assert request.prompt.tolist() == expected
    whole = (await http.post("/api/chat", json={**body, "stream": False})).json()
    assert whole["message"] == {"role": "assistant", "content": REPLY} and whole["done"]
    assert set(whole) == set(last)
    options: dict[str, Any] = {"num_predict": 0, "temperature": 7, "top_p": 1.5, "min_p": -1}
    await http.post("/api/chat", json={**CHAT, "options": options})  # in Ollama's ranges
    request = engine.seen[-1]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.min_p) == (
        2,
        1,
        0,
    )
    assert request.stopping.max_tokens > 60
    cut = await http.post("/api/chat", json={**CHAT, "options": {"num_predict": 2}})
    assert lines(cut)[-1]["done_reason"] == "length"


async def test_generate(http: httpx.AsyncClient, engine: Any, tokenizer: Any) -> None:
    body = {"model": "tiny", "prompt": "hello", "system": "Be brief.", "stream": False}
    whole = (await http.post("/api/generate", json=body)).json()
    assert whole["response"] == REPLY and whole["done_reason"] == "stop"
    shown = tokenizer.decode(engine.seen[-1].prompt, False)
    assert shown.startswith("<|im_start|>system\nBe brief.") and "user\nhello" in shown
    raw = await http.post("/api/generate", json={"model": "tiny", "prompt": "hello", "raw": True})
    assert "".join(line["response"] for line in lines(raw)) == REPLY
    assert engine.seen[-1].prompt.tolist() == tokenizer.encode("hello")


async def test_thoughts_and_calls(
    http: httpx.AsyncClient, engine: Any, tokenizer: Any, says: Callable[[str], None]
) -> None:
    says(f"<think>\nWell.\n</think>\n\nI look.\n{CALL}\n{CALL}")
    body = {**CHAT, "tools": [TOOL], "think": True}
    called = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    whole = (await http.post("/api/chat", json={**body, "stream": False})).json()["message"]
    assert whole["tool_calls"] == [called, called]
    assert (whole["thinking"], whole["content"].strip()) == ("Well.", "I look.")
    assert tokenizer.decode(engine.seen[-1].prompt, False).endswith("True")
    said = [line["message"] for line in lines(await http.post("/api/chat", json=body))]
    assert [call for line in said for call in line.get("tool_calls", ())] == [called, called]
    assert "".join(line.get("thinking", "") for line in said) == "Well."
    result = [{"role": "tool", "content": text, "tool_name": "weather"} for text in "ab"]
    await http.post("/api/chat", json={**body, "messages": [*HELLO, whole, *result]})
    shown = tokenizer.decode(engine.seen[-1].prompt, False)
    assert "Well.I look." in shown and shown.count('"arguments": {"city": "Rome"}') == 2
    assert "a(call_1_0)" in shown and "b(call_1_1)" in shown


async def test_forms(http: httpx.AsyncClient, engine: Any, says: Callable[[str], None]) -> None:
    says('{"city": "Rome"}')
    for form, word in (("json", ""), (SCHEMA, "city")):
        answer = await http.post("/api/chat", json={**CHAT, "format": form, "stream": False})
        assert json.loads(answer.json()["message"]["content"]) == {"city": "Rome"}
        assert word in engine.seen[-1].part(Guidance).grammar


async def test_models(http: httpx.AsyncClient, says: Callable[[str], None]) -> None:
    cards = (await http.get("/api/tags")).json()["models"]
    assert [card["name"] for card in cards] == ["org/tiny", "tiny"] and cards[0]["digest"]
    assert (await http.get("/api/ps")).json()["models"][0]["context_length"] == 4096
    shown = (await http.post("/api/show", json={"model": "tiny"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 4096
    assert (await http.get("/api/version")).json()["version"][0].isdigit()
    loaded = (await http.post("/api/generate", json={"model": "tiny"})).json()
    assert (loaded["done_reason"], loaded["response"]) == ("load", "")


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/api/chat", {"model": "other"}, 404, "other"),
    ("/api/chat", {"messages": "hello"}, 400, "messages"),
    ("/api/chat", {"messages": [{"content": "a"}]}, 400, "messages[0].role"),
    ("/api/chat", {"messages": [{"role": "user", "content": "", "images": [5]}]}, 400, "images"),
    ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "function"),
    ("/api/chat", {"options": {"temperature": "hot"}}, 400, "options.temperature"),
    ("/api/chat", {"options": {"top_p": "x"}}, 400, "options.top_p"),
    ("/api/chat", {"options": {"num_predict": "x"}}, 400, "options.num_predict"),
    ("/api/chat", {"format": 5}, 400, "format"),
    ("/api/chat", {"template": "x"}, 400, "template"),
    ("/api/chat", {"tools": [{"type": "function"}]}, 400, "tools[0].function"),
    ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ("/api/generate", {"prompt": "a b " * 200}, 400, "too long"),
    ("/api/generate", {"prompt": "a", "raw": True, "images": ["aGk="]}, 400, "images"),
    ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system"),
    ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}] * 129}]}, 400, "128"),
    ("/api/embed", {"input": "a"}, 404, "does not support"),
    ("/api/show", {"model": "other"}, 404, "other"),
]


async def test_bad_bodies(http: httpx.AsyncClient, engine: Any) -> None:
    for path, fields, status, word in BAD:
        body = {**(CHAT if path == "/api/chat" else {"model": "tiny"}), **fields}
        answer = await http.post(path, json=body)
        assert answer.status_code == status, (fields, answer.text)
        assert set(answer.json()) == {"error"} and word in answer.json()["error"], answer.text
    assert engine.seen == []


def test_a_result_looks_through_few_calls() -> None:
    """However many an adversary's assistant has made."""
    calls = [{"function": {"name": "f", "arguments": {}}}] * MAX_TOOLS
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "content": "a"}
    *_, last = OllamaChat(model="tiny", messages=[said, said, result]).chat()
    assert last["tool_call_id"] == "call_1_0"


async def test_a_body_of_any_type(http: httpx.AsyncClient) -> None:
    """curl says that it sends a form, and no browser's page passes as curl."""
    body, headers = b'{"model": "tiny"}', {"content-type": "application/x-www-form-urlencoded"}
    answer = await http.post("/api/show", content=body, headers=headers)
    assert answer.status_code == 200
    headers["origin"] = "http://example.com"
    refused = await http.post("/api/show", content=body, headers=headers)
    assert refused.status_code in (403, 415) and isinstance(refused.json()["error"], str)


async def test_a_key_is_missing(service: Any) -> None:
    """What layers before the routes refuse is said as Ollama says it."""
    service.edge.keys = ApiKeys.load(["secret"])
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:
        refused = await http.post("/api/chat", json=CHAT)
        nothing = await http.get("/api/pull", headers={"Authorization": "Bearer secret"})
    assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    assert refused.json() == {"error": "Incorrect or missing API key."}
    assert nothing.status_code == 404 and "/api/pull" in nothing.json()["error"]


async def test_failures(http: httpx.AsyncClient, engine: Any) -> None:
    engine.refusal = Overloaded("The queue is full.")
    refused = await http.post("/api/chat", json=CHAT)
    assert refused.status_code == 429 and refused.headers["retry-after"]
    assert refused.json() == {"error": "The queue is full."}
    engine.refusal, engine.failure = None, (3, RequestFailed("It failed."))
    assert lines(await http.post("/api/chat", json=CHAT))[-1] == {"error": "It failed."}


async def test_the_ollama_package(service: Any, says: Callable[[str], None]) -> None:
    ollama = pytest.importorskip("ollama")
    says(CALL)
    client = ollama.AsyncClient("http://rayfin", transport=httpx.ASGITransport(build_api(service)))

    def weather(city: str) -> str:
        """Looks.

        Args:
            city: where
        """
        return city

    reply = await client.chat("tiny", HELLO, tools=[weather])
    (call,) = reply.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    says("It is sunny.")
    result = {"role": "tool", "content": "sunny", "tool_name": "weather"}
    stream = await client.chat("tiny", [*HELLO, reply.message, result], stream=True)
    parts = [part async for part in stream]
    assert "".join(part.message.content for part in parts) == "It is sunny."
    assert parts[-1].done and parts[-1].eval_count and parts[-1].prompt_eval_count
    says('{"city": "Rome"}')
    formed = await client.generate("tiny", "hello", format=SCHEMA, options={"temperature": 0})
    assert json.loads(formed.response) == {"city": "Rome"}
    assert [model.model for model in (await client.list()).models] == ["org/tiny", "tiny"]
    assert (await client.ps()).models and "tools" in (await client.show("tiny")).capabilities
    with pytest.raises(ollama.ResponseError, match="does not exist") as error:
        await client.chat("other", HELLO)
    assert error.value.status_code == 404
