"""Every bad request is answered 4xx with an error that names its place; nothing is generated."""

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from rayfin.deployments.api.app import build_api
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.keys import ApiKeys

pytestmark = pytest.mark.anyio
MISSING, TYPE, VALUE = "missing_required_parameter", "invalid_type", "invalid_value"
UNSERVED, CONTENT = "unsupported_parameter", "unsupported_content"
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "5"}
TOOL = {"type": "function", "name": "f", "parameters": {}}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {}}

BODIES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", MISSING),
    ({"input": ""}, "input", "empty_prompt"),
    ({"input": []}, "input", "empty_array"),
    ({"input": 5}, "input", TYPE),
    ({"input": {"role": "user"}}, "input", TYPE),
    ({"input": ["a"]}, "input[0]", TYPE),
    ({"input": [USER, {"content": "a"}]}, "input[1].role", MISSING),
    ({"input": [{**USER, "role": "tool"}]}, "input[0].role", VALUE),
    ({"input": [{"role": "user"}]}, "input[0].content", MISSING),
    ({"input": [{**USER, "content": 5}]}, "input[0].content", TYPE),
    ({"input": [{**USER, "content": []}]}, "input[0].content", "empty_array"),
    ({"input": [{**USER, "content": [{}]}]}, "input[0].content[0].type", MISSING),
    (
        {"input": [{**USER, "content": [{"type": "input_image", "image_url": "http://x"}]}]},
        "input[0].content[0].type",
        CONTENT,
    ),
    (
        {"input": [{**USER, "content": [{"type": "input_text", "text": 5}]}]},
        "input[0].content[0].text",
        TYPE,
    ),
    ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0].type", CONTENT),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", MISSING),
    ({"input": [{**OUTPUT, "call_id": 5}]}, "input[0].call_id", TYPE),
    ({"input": [{**OUTPUT, "call_id": ""}]}, "input[0].call_id", VALUE),
    ({"input": [OUTPUT]}, "input[0].call_id", VALUE),
    ({"input": [CALL, {**OUTPUT, "call_id": "d"}]}, "input[1].call_id", VALUE),
    ({"input": [OUTPUT, CALL]}, "input[0].call_id", VALUE),
    ({"input": [CALL, {**OUTPUT, "output": None}]}, "input[1].output", MISSING),
    ({"input": [CALL, {**OUTPUT, "output": {}}]}, "input[1].output", TYPE),
    (
        {"input": [CALL, {**OUTPUT, "output": [{"type": "input_image", "image_url": "x"}]}]},
        "input[1].output[0].type",
        CONTENT,
    ),
    (
        {"input": [CALL, {**OUTPUT, "output": [{"type": "input_image", "file_id": "x"}]}]},
        "input[1].output[0].file_id",
        CONTENT,
    ),
    (
        {"input": [CALL, {**OUTPUT, "output": [{"type": "input_image"}]}]},
        "input[1].output[0].image_url",
        MISSING,
    ),
    (
        {"input": [CALL, {**OUTPUT, "output": [{"type": "input_file"}]}]},
        "input[1].output[0].type",
        CONTENT,
    ),
    ({"input": [{**CALL, "name": "a b"}]}, "input[0].name", VALUE),
    ({"input": [{**CALL, "name": None}]}, "input[0].name", MISSING),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", TYPE),
    ({"input": [{**CALL, "arguments": None}]}, "input[0].arguments", MISSING),
    ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", MISSING),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content", TYPE),
    (
        {"input": [{"type": "reasoning", "content": [{"type": "text", "text": "a"}]}]},
        "input[0].content[0].type",
        CONTENT,
    ),
    (
        {"input": [{"type": "reasoning", "summary": [{"type": "summary_text"}]}]},
        "input[0].summary[0].text",
        MISSING,
    ),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", CONTENT),
    ({"input": [{**USER, "type": 5}]}, "input[0].type", TYPE),
    ({"input": [{**USER, "id": 5}]}, "input[0].id", TYPE),
    ({"input": "a b " * 200}, "input", "context_length_exceeded"),
    ({"input": "a" * 100_000}, "input", "context_length_exceeded"),
    ({"instructions": 5}, "instructions", TYPE),
    ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
    ({"max_output_tokens": "5"}, "max_output_tokens", TYPE),
    ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
    ({"top_p": -0.1}, "top_p", "decimal_below_min_value"),
    ({"metadata": {"a": 5}}, "metadata.a", TYPE),
    ({"metadata": {"a" * 65: "b"}}, "metadata", "string_above_max_length"),
    ({"metadata": {"a": "b" * 513}}, "metadata", "string_above_max_length"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "object_above_max_properties"),
    ({"truncation": "middle"}, "truncation", VALUE),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", VALUE),
    ({"background": True, "store": False}, "background", VALUE),
    ({"tools": "f"}, "tools", TYPE),
    ({"tools": ["f"]}, "tools[0]", TYPE),
    ({"tools": [{"name": "f"}]}, "tools[0].type", MISSING),
    ({"tools": [{"type": "telepathy"}]}, "tools[0].type", UNSERVED),
    ({"tools": [{"type": "custom"}]}, "tools[0].name", MISSING),
    ({"tools": [{"type": "function"}]}, "tools[0].name", MISSING),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", VALUE),
    ({"tools": [{**TOOL, "name": "a" * 129}]}, "tools[0].name", VALUE),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", VALUE),
    ({"tools": [{**TOOL, "name": f"f{i}"} for i in range(129)]}, "tools", "array_above_max_length"),
    ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters", TYPE),
    ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description", TYPE),
    ({"tools": [{**TOOL, "strict": "yes"}]}, "tools[0].strict", TYPE),
    ({"tools": [{**TOOL, "description": "a" * 2**18}]}, "tools", "string_above_max_length"),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice", VALUE),
    ({"tool_choice": 5, "tools": [TOOL]}, "tool_choice", TYPE),
    ({"tool_choice": {}, "tools": [TOOL]}, "tool_choice", MISSING),
    ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice.type", VALUE),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", VALUE),
    ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.name", MISSING),
    (
        {"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]},
        "tool_choice.name",
        VALUE,
    ),
    ({"tool_choice": {**ALLOWED, "mode": "none"}, "tools": [TOOL]}, "tool_choice.mode", VALUE),
    (
        {"tool_choice": {**ALLOWED, "tools": []}, "tools": [TOOL]},
        "tool_choice.tools",
        "empty_array",
    ),
    (
        {"tool_choice": {**ALLOWED, "tools": [TOOL, {"type": "mcp"}]}, "tools": [TOOL]},
        "tool_choice.tools[1].type",
        VALUE,
    ),
    (
        {"tool_choice": ALLOWED, "tools": [{**TOOL, "name": "g"}]},
        "tool_choice.tools[0].name",
        VALUE,
    ),
    ({"parallel_tool_calls": "x"}, "parallel_tool_calls", TYPE),
    ({"include": ["message.output_text.logprobs", "x"]}, "include[1]", VALUE),
    ({"include": "message.output_text.logprobs"}, "include", TYPE),
    ({"include": [5]}, "include[0]", TYPE),
    ({"top_logprobs": -1}, "top_logprobs", "integer_below_min_value"),
    ({"top_logprobs": "3"}, "top_logprobs", TYPE),
    (
        {"include": ["message.output_text.logprobs"], "top_logprobs": 21},
        "top_logprobs",
        "integer_above_max_value",
    ),
    ({"reasoning": {"effort": "enormous"}}, "reasoning.effort", VALUE),
    ({"reasoning": {"effort": 5}}, "reasoning.effort", TYPE),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", VALUE),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", UNSERVED),
    ({"reasoning": "low"}, "reasoning", TYPE),
    ({"text": {"format": "text "}}, "text.format", TYPE),
    ({"text": {"format": {}}}, "text.format.type", MISSING),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", VALUE),
    ({"text": {"format": {"type": "structural_tag"}}}, "text.format.type", VALUE),
    ({"text": {"format": {**SCHEMA, "name": None}}}, "text.format.name", MISSING),
    ({"text": {"format": {**SCHEMA, "schema": None}}}, "text.format.schema", MISSING),
    ({"text": {"format": {**SCHEMA, "schema": []}}}, "text.format.schema", TYPE),
    ({"text": {"format": {**SCHEMA, "strict": 1}}}, "text.format.strict", TYPE),
    ({"prompt": {"id": "p"}}, "prompt", UNSERVED),
    ({"structured_outputs": {"json": {}}}, "structured_outputs", UNSERVED),
    ({"stop": ["a"] * 65}, "stop", "array_above_max_length"),
    ({"model": 5}, "model", TYPE),
]
HARMLESS: dict[str, Any] = {
    "tools": [],
    "tool_choice": "auto",
    "include": [],
    "top_logprobs": 0,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "conversation": None,
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "max_tool_calls": 3,
    "safety_identifier": "me",
    "prompt_cache_key": "mine",
}


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_bodies(http: httpx.AsyncClient, engine: Any, stored: Any, stream: bool) -> None:
    for fields, param, code in BODIES:
        body = {"input": "hi", **({} if "stream_options" in fields else {"stream": stream})}
        response = await http.post("/v1/responses", json={**body, **fields})
        assert response.status_code == 400, (fields, response.text)
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (param, code), fields
        assert "max_tokens" not in error["message"]
    assert engine.seen == [] and len(stored) == 0


async def test_a_refusal_by_the_template_is_about_the_input(
    http: httpx.AsyncClient, service: Any
) -> None:
    service.chat_template = "{{ raise_exception('One turn only.') }}"
    error = (await http.post("/v1/responses", json={"input": "hi"})).json()["error"]
    assert error["param"] == "input" and "One turn only." in error["message"]


async def test_fields_that_ask_for_nothing(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/responses", json={"input": "hi", **HARMLESS})
    assert response.status_code == 200
    assert "x-rayfin-ignored-fields" not in response.headers
    assert response.json()["prompt_cache_key"] == "mine"


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=1", "stream"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("?include[]=message.output_text.logprobs&include[]=x", "include[1]"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=1e3", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_x", "after"),
    ],
)
async def test_bad_queries(http: httpx.AsyncClient, path: str, param: str) -> None:
    made = (await http.post("/v1/responses", json={"input": "hi"})).json()
    response = await http.get(f"/v1/responses/{made['id']}{path}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_another_tenants_responses_are_not_there(service: OpenAIService) -> None:
    service.edge.keys = ApiKeys.load(["alice", "bob"])
    transport = httpx.ASGITransport(build_api(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:

        def client(key: str) -> AsyncOpenAI:
            return AsyncOpenAI(
                api_key=key, base_url="http://rayfin/v1", http_client=http, max_retries=0
            )

        made = await client("alice").responses.create(
            model="tiny", input="my secret", background=True
        )
        headers = {"Authorization": "Bearer bob"}
        path = f"/v1/responses/{made.id}"
        answers = [
            await http.get(path, headers=headers),
            await http.get(f"{path}?stream=true", headers=headers),
            await http.get(f"{path}/input_items", headers=headers),
            await http.post(f"{path}/cancel", headers=headers),
            await http.delete(path, headers=headers),
            await http.post(
                "/v1/responses",
                json={"input": "go on", "previous_response_id": made.id},
                headers=headers,
            ),
        ]
        assert [answer.status_code for answer in answers] == [404] * 6
        assert not any("secret" in answer.text for answer in answers)
        assert (await client("alice").responses.retrieve(made.id)).id == made.id
