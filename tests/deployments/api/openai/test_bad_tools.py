"""What is wrong with tools, their choice and thinking: each a 400 that names the field."""

import time
from typing import Any

import httpx
import pytest

from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.formats import REASONING_FORMATS, TOOL_FORMATS

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
MISSING, TYPE, VALUE = "missing_required_parameter", "invalid_type", "invalid_value"
BELOW, LONG, UNSERVED = "integer_below_min_value", "array_above_max_length", "unsupported_parameter"
FORMAT = {"response_format": {"type": "json_object"}}


def tool(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(**fields: Any) -> dict[str, Any]:
    given = {"mode": "auto", "tools": [named("f")], **fields}
    return {"type": "allowed_tools", "allowed_tools": given}


def choose(choice: Any) -> dict[str, Any]:
    return {"tools": [tool()], "tool_choice": choice}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [], "tool_choice": "auto"}, "tool_choice", VALUE),
    ({"tools": {}}, "tools", TYPE),
    ({"tools": [5]}, "tools[0]", TYPE),
    ({"tools": [{"type": "custom", "custom": {"name": 1}}]}, "tools[0].custom.name", TYPE),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom", MISSING),
    ({"tools": [{"type": "telepathy"}]}, "tools[0].type", UNSERVED),
    ({"tools": [{"type": "function"}]}, "tools[0].function", MISSING),
    ({"tools": [tool(None)]}, "tools[0].function.name", MISSING),
    ({"tools": [tool("a b")]}, "tools[0].function.name", VALUE),
    ({"tools": [tool("x" * 65)]}, "tools[0].function.name", VALUE),
    ({"tools": [tool(), tool()]}, "tools[1].function.name", VALUE),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", LONG),
    ({"tools": [tool(description="x" * 270_000)]}, "tools", "string_above_max_length"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", TYPE),
    ({"tools": [tool(parameters="x")]}, "tools[0].function.parameters", TYPE),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", TYPE),
    ({"tool_choice": "auto"}, "tool_choice", VALUE),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"tool_choice": named("f")}, "tool_choice", VALUE),
    (choose({}), "tool_choice", MISSING),
    (choose("any"), "tool_choice", VALUE),
    (choose(5), "tool_choice", TYPE),
    (choose({"type": "tool", "name": "f"}), "tool_choice.type", VALUE),
    (choose({"type": "function"}), "tool_choice.function", MISSING),
    (choose(named(None)), "tool_choice.function.name", MISSING),
    (choose(named("g")), "tool_choice.function.name", VALUE),
    (choose({"type": "allowed_tools"}), "tool_choice.allowed_tools", MISSING),
    (choose(allowed(mode="none")), "tool_choice.allowed_tools.mode", VALUE),
    (choose(allowed(tools=[])), "tool_choice.allowed_tools.tools", "empty_array"),
    (
        choose(allowed(tools=[named("g")])),
        "tool_choice.allowed_tools.tools[0].function.name",
        VALUE,
    ),
    ({"parallel_tool_calls": "x"}, "parallel_tool_calls", TYPE),
    ({"thinking_token_budget": 1.5}, "thinking_token_budget", TYPE),
    ({"thinking_token_budget": True}, "thinking_token_budget", TYPE),
    ({"thinking_token_budget": -2}, "thinking_token_budget", BELOW),
    ({"reasoning_effort": "lots"}, "reasoning_effort", VALUE),
    ({"reasoning_effort": 3}, "reasoning_effort", TYPE),
    ({"include_reasoning": "no"}, "include_reasoning", TYPE),
    ({"messages": [{"role": "tool", "content": "9"}]}, "messages[0].tool_call_id", MISSING),
]


def bodies() -> list[Any]:
    return [pytest.param(*row, id=f"{i} {row[1]}") for i, row in enumerate(BAD)]


@pytest.mark.parametrize(("fields", "param", "code"), bodies())
@pytest.mark.parametrize("known", [False, True])
async def test_bad_fields(
    http: httpx.AsyncClient,
    engine: Any,
    service: OpenAIService,
    fields: dict[str, Any],
    param: str,
    code: str,
    known: bool,
) -> None:
    """The same whether the model's formats are known or not, within a second of processor time."""
    if known:
        service.formats = Detected(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
    started = time.process_time()
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    response = await http.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert time.process_time() - started < 1 and not engine.seen


async def test_a_budget_needs_a_model_whose_reasoning_is_known(
    http: httpx.AsyncClient, service: OpenAIService
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": 0}
    error = (await http.post(PATH, json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("thinking_token_budget", UNSERVED)
    body["thinking_token_budget"] = -1
    assert (await http.post(PATH, json=body)).status_code == 200


async def test_a_refusal_leaves_a_neighbours_stream_alone(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    alone = (await http.post(PATH, json=body)).text.count("data:")
    async with http.stream("POST", PATH, json=body) as response:
        lines = response.aiter_lines()
        seen = [await anext(lines)]
        for fields, _, _ in BAD:
            assert (await http.post(PATH, json={**body, **fields})).status_code == 400
        seen += [line async for line in lines]
    assert sum(line.startswith("data:") for line in seen) == alone
