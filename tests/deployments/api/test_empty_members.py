"""An optional member that is null or empty is the same as one that is left out, in all APIs."""

from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 2},
    TEXT: {"prompt": "hello", "max_tokens": 2},
    RESPONSES: {"input": [USER], "max_output_tokens": 16},
    MESSAGES: {"messages": [USER], "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [[USER]], "max_tokens": 2},
    "/tokenize": {"messages": [USER]},
}
SAMPLING = {
    **{"stop": [], "logit_bias": {}, "stop_token_ids": [], "metadata": {}, "user": ""},
    **{"stream_options": {}, "kv_transfer_params": {}, "vllm_xargs": {}, "mm_processor_kwargs": {}},
}
COMPLETION = {
    **SAMPLING,
    **{"bad_words": [], "response_format": None, "logprob_token_ids": [], "request_id": ""},
    **{"structured_outputs": None, "suffix": "", "prompt_embeds": [], "session_id": ""},
}
TEMPLATE = {"tools": [], "documents": [], "chat_template_kwargs": {}, "chat_template": ""}
EMPTY: dict[str, dict[str, Any]] = {
    CHAT: {
        **(COMPLETION | TEMPLATE),
        **{"tool_choice": None, "modalities": [], "functions": [], "audio": {}},
    },
    TEXT: COMPLETION,
    RESPONSES: {
        **SAMPLING,
        **{"tools": [], "instructions": "", "previous_response_id": "", "include": []},
        **{"text": {}, "reasoning": {}, "documents": [], "conversation": "", "prompt": {}},
    },
    MESSAGES: {
        **{"system": [], "tools": [], "stop_sequences": [], "metadata": {}, "mcp_servers": []},
        **{"container": "", "context_management": {}, "output_config": {}},
    },
    "/v1/chat/completions/batch": {"tools": [], "bad_words": []},
    "/tokenize": {**TEMPLATE, "mm_processor_kwargs": {}},
}
FIELDS = [
    *((path, {name: value}) for path, fields in EMPTY.items() for name, value in fields.items()),
    *((path, {name: None}) for path, fields in EMPTY.items() for name in fields),
    (MESSAGES, {"system": ""}),
    (MESSAGES, {"system": [{"type": "text", "text": ""}]}),
    (CHAT, {"messages": [{**USER, "name": ""}]}),
    (CHAT, {"messages": [{**USER, "tool_calls": []}]}),
]


@pytest.mark.parametrize("path", BODIES)
async def test_members(http: httpx.AsyncClient, engine: Any, path: str) -> None:
    """Each alone, and the prompt and the rules of the request are as without it."""

    async def asked(fields: Any) -> Any:
        engine.seen.clear()
        response = await http.post(path, json={**BODIES[path], **fields})
        assert response.status_code == 200, (fields, response.text)
        if path == "/tokenize":
            return response.json()
        (request,) = engine.seen
        sampling = request.sampling
        return request.prompt.tolist(), sampling.logit_bias, sampling.bad_words, request.stopping

    plain = await asked({})
    for of, fields in FIELDS:
        if of == path:
            assert await asked(fields) == plain, fields


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1"}
FLAT = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1"}
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
GAVE = {"type": "tool_result", "tool_use_id": "c1"}


@pytest.mark.parametrize("empty", ["", [], None])
async def test_contents(http: httpx.AsyncClient, engine: Any, empty: Any) -> None:
    """Of an assistant that only calls, and of a tool that gave nothing."""
    chat = [USER, {**CALLS, "content": empty}, {**RESULT, "content": empty}]
    items = [USER, {"role": "assistant", "content": empty or []}, FLAT]
    items += [{**OUTPUT, "output": empty or []}]
    blocks = [USER, {"role": "assistant", "content": [USE]}]
    blocks += [{"role": "user", "content": [{**GAVE, "content": empty}]}]
    blocks += [{"role": "assistant", "content": empty or []}, USER]
    bodies = [(CHAT, {"messages": chat}), (RESPONSES, {"input": items})]
    for path, body in (*bodies, (MESSAGES, {"messages": blocks, "max_tokens": 2})):
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
    said = [request.prompt.tolist() for request in engine.seen]
    text = [{**message, "content": message.get("content") or ""} for message in chat]
    await http.post(CHAT, json={"messages": text})
    assert said[0] == said[1] == engine.seen[-1].prompt.tolist()


@pytest.mark.parametrize("name", ["José", "李明", "O'Neil", "a.b-c_d", "x" * 64])
async def test_names_are_of_any_script(http: httpx.AsyncClient, name: str) -> None:
    body = {"messages": [{**USER, "name": name}]}
    assert (await http.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize("name", ["a b", "a<", "a|b", "a\\b", "a/b", ">", "x" * 65, "a\u2003b"])
async def test_names_that_openai_refuses(http: httpx.AsyncClient, name: str) -> None:
    response = await http.post(CHAT, json={"messages": [{**USER, "name": name}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].name"
