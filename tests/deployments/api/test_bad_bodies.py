"""Every bad body is answered 4xx with an error that names its place; nothing reaches the engine."""

import json
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "hi"}
MESSAGES = {"messages": [USER]}
TOOL = {"type": "function", "function": {"name": "f"}}
MISSING, TYPE, VALUE = "missing_required_parameter", "invalid_type", "invalid_value"
LOW, HIGH = "integer_below_min_value", "integer_above_max_value"
UNSERVED = "unsupported_parameter"

COMPLETIONS: list[tuple[Any, str | None, str]] = [
    ({}, "prompt", MISSING),
    ({"prompt": None}, "prompt", MISSING),
    ({"prompt": ""}, "prompt", "empty_prompt"),
    ({"prompt": []}, "prompt", "empty_array"),
    ({"prompt": [[]]}, "prompt[0]", "empty_array"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty_prompt"),
    ({"prompt": ["a"] * 1025}, "prompt", "array_above_max_length"),
    ({"prompt": [1, "a"]}, "prompt[1]", TYPE),
    ({"prompt": [True, False]}, "prompt[0]", TYPE),
    ({"prompt": [1.0]}, "prompt[0]", TYPE),
    ({"prompt": [[1], [True]]}, "prompt[1][0]", TYPE),
    ({"prompt": ["a", [1]]}, "prompt[1]", TYPE),
    ({"prompt": {"a": 1}}, "prompt", TYPE),
    ({"prompt": [[[1]]]}, "prompt[0][0]", TYPE),
    ({"prompt": [-1]}, "prompt", "invalid_token_id"),
    ({"prompt": [999999]}, "prompt", "invalid_token_id"),
    ({"prompt": [[1], [2**63]]}, "prompt[1]", "invalid_token_id"),
    ({"prompt": [10**20]}, "prompt", "invalid_token_id"),
    ({"prompt": [5] * 128}, "prompt", "context_length_exceeded"),
    ({"prompt": "a" * 100_000}, "prompt", "context_length_exceeded"),
    ({"prompt": ["a", "b "] * 60, "n": 150}, "n", VALUE),
    ({"max_tokens": 0}, "max_tokens", LOW),
    ({"max_tokens": -1}, "max_tokens", LOW),
    ({"max_tokens": 1.5}, "max_tokens", TYPE),
    ({"max_tokens": "5"}, "max_tokens", TYPE),
    ({"max_tokens": True}, "max_tokens", TYPE),
    ({"min_tokens": 17}, "min_tokens", HIGH),
    ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
    ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
    ({"temperature": "NaN"}, "temperature", TYPE),
    ({"temperature": True}, "temperature", TYPE),
    ({"temperature": 10**400}, "temperature", TYPE),
    ({"temperature": 0, "n": 2}, "n", VALUE),
    ({"top_p": -0.1}, "top_p", "decimal_below_min_value"),
    ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", LOW),
    ({"top_k": 1.5}, "top_k", TYPE),
    ({"min_p": 1.1}, "min_p", "decimal_above_max_value"),
    ({"n": 0}, "n", LOW),
    ({"n": 16385}, "n", HIGH),
    ({"best_of": 0}, "best_of", LOW),
    ({"presence_penalty": 2.5}, "presence_penalty", "decimal_above_max_value"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "decimal_below_min_value"),
    ({"frequency_penalty": "1"}, "frequency_penalty", TYPE),
    ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"logprobs": 21}, "logprobs", HIGH),
    ({"logprobs": -1}, "logprobs", HIGH),
    ({"logprobs": -2}, "logprobs", LOW),
    ({"logprobs": True}, "logprobs", TYPE),
    ({"logprobs": {"a": [1] * 3}}, "logprobs", TYPE),
    ({"prompt_logprobs": -2, "stream": False}, "prompt_logprobs", LOW),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", VALUE),
    ({"echo": False, "max_tokens": 0}, "max_tokens", LOW),
    ({"allowed_token_ids": []}, "allowed_token_ids", VALUE),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids", "invalid_token_id"),
    ({"bad_words": [""]}, "bad_words", VALUE),
    ({"bad_words": [str(i) for i in range(200)]}, "bad_words", "array_above_max_length"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", LOW),
    ({"truncate_prompt_tokens": 129}, "truncate_prompt_tokens", HIGH),
    ({"truncation_side": "middle"}, "truncation_side", VALUE),
    ({"cache_salt": ""}, "cache_salt", VALUE),
    ({"cache_salt": "a/b"}, "cache_salt", VALUE),
    ({"cache_salt": 5}, "cache_salt", TYPE),
    ({"request_id": "a b"}, "request_id", VALUE),
    ({"request_id": "a" * 129}, "request_id", VALUE),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids", TYPE),
    ({"prompt": {"prompt": "a", "multi_modal_data": {}}}, "prompt", TYPE),
    ({"prompt": {"prompt_token_ids": [True]}}, "prompt.prompt_token_ids[0]", TYPE),
    ({"seed": 2**64}, "seed", HIGH),
    ({"seed": "x"}, "seed", TYPE),
    ({"stop": [""]}, "stop", VALUE),
    ({"stop": [None]}, "stop", TYPE),
    ({"stop": 5}, "stop", TYPE),
    ({"stop": {"a": 1}}, "stop", TYPE),
    ({"stop": ["a"] * 65}, "stop", "array_above_max_length"),
    ({"stop": "a" * 10_000}, "stop", "string_above_max_length"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", LOW),
    ({"stop_token_ids": [99999]}, "stop_token_ids", "invalid_token_id"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", TYPE),
    ({"stop_token_ids": [1] * 5000}, "stop_token_ids", "array_above_max_length"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5", TYPE),
    ({"logit_bias": {"x": 1}}, "logit_bias", TYPE),
    ({"logit_bias": {"-1": 1}}, "logit_bias", LOW),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_token_id"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias", "decimal_above_max_value"),
    ({"logit_bias": {"5": 1, "6": -101}}, "logit_bias", "decimal_below_min_value"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", VALUE),
    ({"stream": "yes"}, "stream", TYPE),
    ({"stream": 1}, "stream", TYPE),
    ({"stream_options": {"include_usage": True}}, "stream_options", VALUE),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"suffix": "x"}, "suffix", UNSERVED),
    ({"use_beam_search": 1}, "use_beam_search", TYPE),
    ({"use_beam_search": True, "stream": True}, "stream", VALUE),
    ({"length_penalty": 2.0}, "length_penalty", VALUE),
    ({"early_stopping": True}, "early_stopping", VALUE),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", UNSERVED),
    ({"response_format": {"type": "wizard"}}, "response_format.type", VALUE),
    ({"priority": 2**40}, "priority", VALUE),
    ({"stream_interval": 0}, "stream_interval", LOW),
    ({"stream_interval": "2"}, "stream_interval", TYPE),
    ({"session_id": 5}, "session_id", TYPE),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", VALUE),
    ({"flat_logprobs": True}, "flat_logprobs", UNSERVED),
    ({"thinking_token_budget": 5}, "thinking_token_budget", UNSERVED),
    ({"repetition_detection": {"max_pattern_size": 2}}, "repetition_detection.min_count", LOW),
    ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", UNSERVED),
    ({"user": 5}, "user", TYPE),
    ({"model": 5}, "model", TYPE),
]
CHATS: list[tuple[Any, str | None, str]] = [
    ({"messages": None}, "messages", MISSING),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": {}}, "messages", TYPE),
    ({"messages": [{"content": "x"}]}, "messages[0].role", MISSING),
    ({"messages": [USER, {**USER, "role": "a wizard"}]}, "messages[1].role", VALUE),
    ({"messages": [{**USER, "content": 5}]}, "messages[0].content", TYPE),
    ({"messages": [{**USER, "content": "a" * 10**5}]}, "messages", "context_length_exceeded"),
    ({"messages": [{**USER, "content": "a b " * 200}]}, "messages", "context_length_exceeded"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", VALUE),
    ({"documents": "x"}, "documents", TYPE),
    ({"documents": ["x"]}, "documents[0]", TYPE),
    ({"chat_template_kwargs": {"documents": ["x"]}}, "messages", VALUE),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom", "missing_required_parameter"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", VALUE),
    ({"tool_choice": "auto"}, "tool_choice", VALUE),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", VALUE),
    ({"tools": [TOOL], "tool_choice": {}}, "tool_choice", MISSING),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", MISSING),
    ({"tool_choice": 5}, "tool_choice", VALUE),
    ({"parallel_tool_calls": "x"}, "parallel_tool_calls", TYPE),
    ({"logprobs": 1}, "logprobs", TYPE),
    ({"top_logprobs": 3}, "top_logprobs", VALUE),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", HIGH),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", LOW),
    ({"cache_salt": "@"}, "cache_salt", VALUE),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", LOW),
    ({"chat_template": "{{ 7*7 }}"}, "chat_template", UNSERVED),
    (
        {"chat_template_kwargs": {"tokenize": False}},
        "chat_template_kwargs.tokenize",
        "unknown_parameter",
    ),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", TYPE),
    ({"chat_template_kwargs": {"x": {"<|im_end|>": 1}}}, "tools", VALUE),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        VALUE,
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", LOW),
]
RAW: list[tuple[bytes, str]] = [
    (b"", "invalid_json"),
    (b'{"prompt": "a",}', "invalid_json"),
    (b"[]", TYPE),
    (b'"x"', TYPE),
    (b"null", TYPE),
    (b'{"prompt": "a"} x', "invalid_json"),
    (b'{"n": 1, "n": 99}', "duplicate_key"),
    (b'{"prompt": "\xff"}', "invalid_json"),
    (b"\xef\xbb\xbf{}", "invalid_json"),
    ('{"prompt": "a"}'.encode("utf-16"), "invalid_json"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_number"),
    (b'{"prompt": "a", "x": -Infinity}', "invalid_number"),
    (b'{"prompt": "a", "temperature": 1e999}', "invalid_number"),
    (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "invalid_number"),
    (b'{"x": ' + b"[" * 65 + b"]" * 65 + b"}", "invalid_json"),
    (b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "invalid_json"),
    (b'{"x": ' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001, "invalid_json"),
    (b'{"x": [' + b"1," * 10**6 + b"1]}", "body_too_complex"),
    (b'{"x": {' + b",".join(b'"%d":1' % i for i in range(10**5)) + b"}}", "body_too_complex"),
    (b'{"x": "' + rb"\\" * 9 + b'", "y": ' + b"[" * 65 + b"]" * 65 + b"}", "invalid_json"),
    (rb'{"prompt": "\ud800"}', "invalid_unicode"),
    (rb'{"prompt": "a", "x": [{"\udc00": 1}]}', "invalid_unicode"),
]


def check(response: httpx.Response, engine: Any) -> dict[str, Any]:
    assert 400 <= response.status_code < 500, (response.request.content[:200], response.text)
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 1100
    assert "Traceback" not in response.text and "/work" not in response.text
    assert engine.seen == []
    return error


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_completions(http: httpx.AsyncClient, engine: Any, stream: bool) -> None:
    for fields, param, code in COMPLETIONS:
        body = {} if fields == {} else {"prompt": "a", **fields}
        if stream and param != "stream_options":
            body = {"stream": True, **body}
        response = await http.post("/v1/completions", json=body)
        error = check(response, engine)
        assert response.status_code == 400, fields
        assert (error["param"], error["code"]) == (param, code), fields


async def test_bad_chats(http: httpx.AsyncClient, engine: Any) -> None:
    for fields, param, code in CHATS:
        response = await http.post("/v1/chat/completions", json={**MESSAGES, **fields})
        error = check(response, engine)
        assert response.status_code == 400, fields
        assert (error["param"], error["code"]) == (param, code), fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"messages": [{"role": "user", "content": 5}]},
            "'messages[0].content' must be a string or a list of parts, got int.",
        ),
        (
            {"stream": True, "stream_options": 5},
            "Invalid 'stream_options': Input should be an object.",
        ),
        ({"response_format": "json"}, "Invalid 'response_format': Input should be an object."),
        ({"stream": True, "stream_options": {"x": 1}}, "Unknown parameter: 'stream_options.x'."),
        (
            {"logit_bias": {"hello": 1}},
            "logit_bias maps token ids to numbers, and 'hello' is no token id.",
        ),
    ],
)
async def test_messages_say_what_is_wanted(
    http: httpx.AsyncClient, engine: Any, fields: Any, message: str
) -> None:
    response = await http.post("/v1/chat/completions", json={**MESSAGES, **fields})
    assert check(response, engine)["message"] == message


async def test_bad_json(http: httpx.AsyncClient, engine: Any) -> None:
    headers = {"Content-Type": "application/json"}
    for raw, code in RAW:
        response = await http.post("/v1/completions", content=raw, headers=headers)
        assert response.status_code == 400, raw[:40]
        assert check(response, engine)["code"] == code, raw[:40]


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status", "code"),
    [
        ("POST", "/v1/completions", {}, b"{}", 415, "unsupported_media_type"),
        ("POST", "/v1/completions", {"Content-Type": "text/plain"}, b"{}", 415, None),
        (
            "POST",
            "/v1/completions",
            {"Content-Type": "application/json; charset=utf-16"},
            b"{}",
            415,
            None,
        ),
        (
            "POST",
            "/v1/completions",
            {"Content-Type": "application/json", "Content-Encoding": "gzip"},
            b"{}",
            415,
            None,
        ),
        (
            "POST",
            "/v1/completions",
            {"Content-Type": "application/json"},
            b" " * (4 * 2**20 + 1),
            413,
            "request_too_large",
        ),
        ("GET", "/v1/completions", {}, b"", 405, "method_not_allowed"),
        ("FOO", "/v1/completions", {}, b"", 400, "invalid_request"),
        ("GET", "/v1/nowhere", {}, b"", 404, "unknown_url"),
        ("GET", "/docs", {}, b"", 404, "unknown_url"),
    ],
)
async def test_bad_transport(
    http: httpx.AsyncClient,
    engine: Any,
    method: str,
    path: str,
    headers: Any,
    content: bytes,
    status: int,
    code: str | None,
) -> None:
    response = await http.request(method, path, headers=headers, content=content)
    assert response.status_code == status
    assert check(response, engine)["code"] == (code or "unsupported_media_type")
    assert ("allow" in response.headers) == (status == 405)


async def test_brackets_and_commas_in_strings_are_no_structure(http: httpx.AsyncClient) -> None:
    text = '[{"\\' * 100 + "," * 2**19 + ":" * 2**17
    body = {"prompt": "a", "max_tokens": 1, "user": text, "x": [[[1]]]}
    assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_a_body_without_length_is_counted(http: httpx.AsyncClient, engine: Any) -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 2**20

    headers = {"Content-Type": "application/json"}
    response = await http.post("/v1/completions", content=endless(), headers=headers)
    assert response.status_code == 413


async def test_an_unknown_model(http: httpx.AsyncClient, engine: Any) -> None:
    for name in ("gpt-4", "", "../../etc/passwd", "x" * 10**6):
        response = await http.post("/v1/completions", json={"prompt": "a", "model": name})
        assert response.status_code == 404
        error = check(response, engine)
        assert error["code"] == "model_not_found" and error["param"] == "model"
        assert error["message"] == f"The model `{name[:128]}` does not exist."


async def test_harmless_values_of_unserved_fields(http: httpx.AsyncClient) -> None:
    body = {
        "prompt": "a \x00\u202e",
        "logit_bias": {},
        "bad_words": [],
        "best_of": 1,
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "temperature": None,
        "suffix": "",
        "use_beam_search": False,
        "response_format": {"type": "text"},
        "stream": False,
        "stop": [],
        "top_k": 2**40,
        "vllm_xargs": {},
        "thinking_token_budget": -1,
        "flat_logprobs": False,
        "session_id": "s",
    }
    response = await http.post(
        "/v1/completions",
        content=json.dumps(body),
        headers={"Content-Type": "Application/JSON; charset=UTF-8"},
    )
    assert response.status_code == 200, response.text


OTHERS = [  # what another API calls so, and what to use
    ("/v1/completions", "max_output_tokens", 3, "max_tokens"),
    ("/v1/chat/completions", "stop_sequences", ["go"], "stop"),
    ("/v1/chat/completions", "logits_processors", ["mine"], "logit_bias"),
    ("/v1/chat/completions", "web_search_options", {"user_location": "x"}, ""),
    ("/v1/responses", "max_tokens", 3, "max_output_tokens"),
    ("/v1/responses", "max_completion_tokens", 3, "max_output_tokens"),
    ("/v1/responses", "response_format", {"type": "json_object"}, "text.format"),
    ("/v1/responses", "reasoning_effort", "low", "reasoning.effort"),
    ("/v1/responses", "bad_words", ["go"], ""),
    ("/v1/responses", "n", 2, ""),
    ("/v1/messages", "stop", ["go"], "stop_sequences"),
    ("/v1/messages", "response_format", {"type": "json_object"}, "output_config.format"),
    ("/v1/messages", "n", 2, ""),
]


@pytest.mark.parametrize(("path", "name", "value", "instead"), OTHERS)
async def test_settings_of_other_apis_are_refused(
    http: httpx.AsyncClient, engine: Any, path: str, name: str, value: Any, instead: str
) -> None:
    """They would change the answer, so that to drop them would be a fault no client sees."""
    user = [{"role": "user", "content": "a"}]
    prompt = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}
    asked = {**prompt.get(path, {"messages": user}), name: value}
    asked |= {} if path == "/v1/responses" else {"max_tokens": 2}
    response = await http.post(path, json=asked)
    assert response.status_code == 400 and engine.seen == []
    error = response.json()["error"]
    assert error["message"].startswith(f"{name} is not supported")
    assert not instead or error["message"].endswith(f"Use {instead}.")
    empty = {**asked, name: None}
    assert (await http.post(path, json=empty)).status_code == 200
