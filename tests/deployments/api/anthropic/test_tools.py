"""/v1/messages with tools and thinking, through the anthropic package."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from pydantic import BaseModel

from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import EngineInfo
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.formats import find_reasoning_format, find_tool_format
from rayfin.deployments.text.repair import TemplateRules

pytestmark = pytest.mark.anyio
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "messages": HELLO}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "input_schema": SCHEMA, "description": "Now."}
THOUGHT = "<think>\nThe user asks.\n</think>\n\n"
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function | tojson }}]{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}{{ enable_thinking }} {{ reasoning_effort }}{% endif %}"
    "{% endif %}"
)


class Place(BaseModel):
    city: str


def call(city: str) -> str:
    given = json.dumps({"name": "weather", "arguments": {"city": city}})
    return f"<tool_call>\n{given}\n</tool_call>"


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


async def test_thought_text_and_calls(
    anthropic: AsyncAnthropic, says: Callable[[str], None]
) -> None:
    """Whole and streamed, the message is the same."""
    says(f"{THOUGHT}Let me look.\n{call('Rome')}\n{call('Oslo')}")
    whole = await anthropic.messages.create(**ASKED, tools=[TOOL])
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, rome, oslo = whole.content
    assert (thought.thinking, text.text) == ("The user asks.", "Let me look.")
    assert (rome.name, rome.input, oslo.input) == ("weather", {"city": "Rome"}, {"city": "Oslo"})
    assert rome.id.startswith("call_") and rome.id != oslo.id
    assert (whole.stop_reason, whole.stop_sequence) == ("tool_use", None)
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    async with anthropic.messages.stream(**ASKED, tools=[TOOL]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    for streamed, block in zip(final.content, whole.content, strict=True):
        assert streamed.to_dict() | {"id": 0} == block.to_dict() | {"id": 0}
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details


async def test_a_round_of_calls(
    anthropic: AsyncAnthropic, engine: Any, tokenizer: Any, says: Callable[[str], None]
) -> None:
    says(THOUGHT + call("Rome"))
    first = await anthropic.messages.create(**ASKED, tools=[TOOL])
    called = first.content[1]
    result = {"type": "tool_result", "tool_use_id": called.id, "content": "sunny"}
    says("It is sunny.")
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = await anthropic.messages.create(**{**ASKED, "messages": messages}, tools=[TOOL])
    assert second.content[0].text == "It is sunny." and second.stop_reason == "end_turn"
    text = tokenizer.decode(engine.seen[-1].prompt, False)
    assert f"<think>The user asks.</think>[{called.id} " in text
    assert '{"name": "weather", "arguments": {"city": "Rome"}}]' in text
    assert f"sunny({called.id})" in text and '"description": "Now."' in text
    counted = await anthropic.messages.count_tokens(model="tiny", messages=messages, tools=[TOOL])
    assert counted.input_tokens == len(engine.seen[-1].prompt)
    without = await anthropic.messages.count_tokens(model="tiny", messages=messages)
    assert without.input_tokens < counted.input_tokens


async def test_half_a_character_in_a_call(
    anthropic: AsyncAnthropic, says: Callable[[str], None]
) -> None:
    """A model may write one; no reply can hold it."""
    says(call("\ud83d!"))
    whole = await anthropic.messages.create(**ASKED, tools=[TOOL])
    assert whole.content[-1].input == {"city": "\ufffd!"}


async def test_a_call_that_is_cut(
    anthropic: AsyncAnthropic, engine: Any, says: Callable[[str], None]
) -> None:
    """The stream has its pieces, the whole message leaves it out."""
    says(call("Rome") + call("Oslo"))
    asked = {**ASKED, "max_tokens": len(engine.reply) - 20, "tools": [TOOL]}
    whole = await anthropic.messages.create(**asked)
    assert [block.input for block in whole.content] == [{"city": "Rome"}]
    assert whole.stop_reason == "max_tokens"
    async with anthropic.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert len(final.content) == 2 and final.stop_reason == "max_tokens"


CHOICES: list[tuple[dict[str, Any], str]] = [
    ({}, "tool_use"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_use"),
    ({"tool_choice": {"type": "any"}}, "tool_use"),
    ({"tool_choice": {"type": "tool", "name": "weather"}}, "tool_use"),
    ({"tool_choice": {"type": "none"}}, "text"),
]


@pytest.mark.parametrize(("fields", "kind"), CHOICES)
async def test_tool_choice(
    anthropic: AsyncAnthropic, says: Callable[[str], None], fields: Any, kind: str
) -> None:
    says(call("Rome"))
    reply = await anthropic.messages.create(**ASKED, tools=[TOOL], **fields)
    assert [block.type for block in reply.content] == [kind]
    assert reply.stop_reason == ("tool_use" if kind == "tool_use" else "end_turn")


async def test_a_tool_without_a_type_may_be_forced(http: httpx.AsyncClient, engine: Any) -> None:
    body = {**ASKED, "max_tokens": 3, "tools": [{**TOOL, "type": None}]}
    body["tool_choice"] = {"type": "tool", "name": "weather"}
    assert (await http.post("/v1/messages", json=body)).is_success
    assert engine.seen[-1].part(Guidance).grammar


THINKING: list[tuple[dict[str, Any], str]] = [
    ({}, "assistant\n"),
    ({"thinking": {"type": "disabled"}}, "False "),
    ({"thinking": {"type": "adaptive"}}, "True "),
    ({"thinking": {"type": "enabled", "budget_tokens": 40}}, "True "),
    ({"output_config": {"effort": "high"}}, "True high"),
    ({"output_config": {"effort": "max"}, "thinking": {"type": "disabled"}}, "False max"),
]


@pytest.mark.parametrize(("fields", "end"), THINKING)
async def test_thinking(
    anthropic: AsyncAnthropic,
    engine: Any,
    tokenizer: Any,
    says: Callable[[str], None],
    fields: Any,
    end: str,
) -> None:
    says(f"{THOUGHT}Hello.")
    reply = await anthropic.messages.create(**ASKED, **fields)
    assert [block.type for block in reply.content] == ["thinking", "text"]
    assert tokenizer.decode(engine.seen[-1].prompt, False).endswith(end)


async def test_thinking_may_be_left_out(
    anthropic: AsyncAnthropic, says: Callable[[str], None]
) -> None:
    says(f"{THOUGHT}Hello.")
    shown: Any = {"type": "adaptive", "display": "omitted"}
    reply = await anthropic.messages.create(**ASKED, thinking=shown)
    assert [block.type for block in reply.content] == ["text"]
    assert reply.usage.output_tokens_details.thinking_tokens > 0


async def test_a_tool_runner_goes_on_without_threads(
    anthropic: AsyncAnthropic, says: Callable[[str], None], engine: Any
) -> None:
    """Its first request asks for a thread, and is refused so that it sends whole conversations."""
    says(call("Rome"))

    @beta_async_tool
    async def weather(city: str) -> str:
        """Looks.

        Args:
            city: where
        """
        says(f"It is sunny in {city}.")
        return "sunny"

    runner = anthropic.beta.messages.tool_runner(
        model="tiny", max_tokens=400, messages=HELLO, tools=[weather]
    )
    final = await runner.until_done()
    assert final.content[0].text == "It is sunny in Rome." and len(engine.seen) == 2


async def test_a_deferred_tool_is_shown_where_it_is_referenced(
    http: httpx.AsyncClient, engine: Any, tokenizer: Any, says: Callable[[str], None]
) -> None:
    says(call("Rome"))
    find = {"name": "find", "input_schema": {"type": "object"}}
    used = {"type": "tool_use", "id": "t", "name": "find", "input": {}}
    deferred = {**TOOL, "defer_loading": True}
    references = [{"type": "tool_reference", "tool_name": "weather"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": references}
    found = [
        *HELLO,
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]

    async def ask(messages: Any, *tools: Any) -> tuple[str, str]:
        body = {**ASKED, "messages": messages, "tools": tools}
        reply = (await http.post("/v1/messages", json=body)).json()
        return tokenizer.decode(engine.seen[-1].prompt, False), reply["stop_reason"]

    bare, _ = await ask(HELLO, find)
    hidden, stop = await ask(HELLO, find, deferred)
    assert hidden == bare and stop == "end_turn"  # a call of it is text
    shown, stop = await ask(found, find, deferred)
    assert shown.startswith(bare.partition("<|im_end|>")[0]) and stop == "tool_use"
    assert shown.count('"name": "weather"') == 1 and '"description": "Now."' in shown


async def test_a_model_of_one_call_writes_one(
    anthropic: AsyncAnthropic, says: Callable[[str], None], service: Any, engine: Any
) -> None:
    says(call("Rome"))
    await anthropic.messages.create(**ASKED, tools=[TOOL])
    free = engine.seen[-1].part(Guidance)
    service.formats = replace(service.formats, rules=TemplateRules(one_call=True))
    await anthropic.messages.create(**ASKED, tools=[TOOL])
    held = engine.seen[-1].part(Guidance)
    single: Any = {"type": "auto", "disable_parallel_tool_use": True}
    await anthropic.messages.create(**ASKED, tools=[TOOL], tool_choice=single)
    assert held == engine.seen[-1].part(Guidance) != free


@pytest.mark.parametrize("name", ["output_config", "output_format"])
async def test_a_form_becomes_a_grammar(
    anthropic: AsyncAnthropic, engine: Any, says: Callable[[str], None], name: str
) -> None:
    says('{"city": "Rome"}')
    form = {"type": "json_schema", "schema": Place.model_json_schema()}
    body = {name: {"format": form} if name == "output_config" else form}
    reply = await anthropic.messages.create(**ASKED, extra_body=body)
    assert json.loads(reply.content[0].text) == {"city": "Rome"}
    assert "city" in engine.seen[-1].part(Guidance).grammar
    if name == "output_config":
        parsed = await anthropic.messages.parse(**ASKED, output_format=Place)
        assert parsed.parsed_output == Place(city="Rome")


async def test_a_schema_that_cannot_be_enforced(
    http: httpx.AsyncClient, says: Callable[[str], None]
) -> None:
    form = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}
    response = await http.post("/v1/messages", json={**ASKED, "output_config": {"format": form}})
    assert response.status_code == 400
    assert "output_config.format.schema.uniqueItems" in response.json()["error"]["message"]
    form["schema"] = SCHEMA
    fields = {"tools": [TOOL], "tool_choice": {"type": "any"}, "output_config": {"format": form}}
    response = await http.post("/v1/messages", json={**ASKED, **fields})
    assert response.status_code == 200  # the call wins
    assert response.headers["x-rayfin-unenforced"] == "output_config.format.schema"
