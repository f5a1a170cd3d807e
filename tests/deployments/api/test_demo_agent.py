"""The demo model as an agent: its weather tool and forms of answers, by the public clients."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import httpx
import httpx2
import pytest
from anthropic import AsyncAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel

from inline_client import InlineClient
from rayfin.actors.config import EngineArgs
from rayfin.deployments.api.app import build_api
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.offline.engines import OfflineEngine, start_engine
from rayfin.deployments.serve.preflight import model_path
from rayfin.deployments.text.parsing.detect import detect
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow(reason="runs the demo model")]
QUESTION = "What is the weather in Rome?"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city"}},
    "required": ["city"],
}
DESCRIPTION = "Get the current weather for a city."
RESULT = '{"city": "Rome", "weather": "sunny", "degrees": 21}'
FLAT: Any = {
    "type": "function",
    "name": "get_weather",
    "description": DESCRIPTION,
    "parameters": WEATHER,
    "strict": True,
}
FUNCTION: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": DESCRIPTION, "parameters": WEATHER},
}
TOOL: Any = {"name": "get_weather", "description": DESCRIPTION, "input_schema": WEATHER}
GREEDY: Any = {"extra_body": {"temperature": 0}}
RECORD = "Anna is 34 years old and lives in Rome."


class Person(BaseModel):
    name: str
    age: int
    city: str


class Capital(BaseModel):
    city: Literal["Rome", "Oslo"]
    sure: bool


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def demo() -> Iterator[OfflineEngine]:
    args = EngineArgs(model=model_path("demo"), threads=1, kv_cache_memory=64 * 1024**2)
    engine = start_engine("inline", args)
    yield engine
    engine.check_integrity()
    engine.close()


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path("demo"))


@pytest.fixture
def engine(demo: OfflineEngine) -> InlineClient:
    return InlineClient(demo)


@pytest.fixture
def service(engine: InlineClient, demo_tokenizer: Tokenizer) -> OpenAIService:
    return OpenAIService(
        engine,  # type: ignore[arg-type]
        demo_tokenizer,
        ["demo"],
        2048,
        formats=detect(demo_tokenizer),
    )


@pytest.fixture
async def openai(service: OpenAIService, anyio_backend: str) -> AsyncIterator[AsyncOpenAI]:
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as client:
        settings: Any = {"api_key": "none", "http_client": client, "max_retries": 0}
        yield AsyncOpenAI(base_url="http://rayfin/v1", **settings)


@pytest.fixture
async def anthropic(service: OpenAIService, anyio_backend: str) -> AsyncIterator[AsyncAnthropic]:
    transport = httpx2.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://rayfin") as client:
        settings: Any = {"api_key": "none", "http_client": client, "max_retries": 0}
        yield AsyncAnthropic(base_url="http://rayfin", **settings)


async def test_responses_call_the_weather_tool(openai: AsyncOpenAI) -> None:
    """A stream with the call, then the answer to its result, by reference."""
    asked: Any = {"model": "demo", "tools": [FLAT], "temperature": 0}
    async with openai.responses.stream(input=QUESTION, **asked) as stream:
        first = await stream.get_final_response()
    (called,) = first.output
    assert called.type == "function_call" and called.name == "get_weather"
    assert called.parsed_arguments == {"city": "Rome"} == json.loads(called.arguments)
    output: Any = {"type": "function_call_output", "call_id": called.call_id, "output": RESULT}
    second = await openai.responses.create(input=[output], previous_response_id=first.id, **asked)
    assert second.output_text == "It is sunny in Rome, 21 degrees."


async def test_messages_call_the_weather_tool(anthropic: AsyncAnthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": "demo", "tools": [TOOL], "max_tokens": 100, **GREEDY}
    async with anthropic.messages.stream(messages=messages, **asked) as stream:
        first = await stream.get_final_message()
    (called,) = first.content
    assert (first.stop_reason, called.type) == ("tool_use", "tool_use")
    assert (called.name, called.input) == ("get_weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": called.id, "content": RESULT}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = await anthropic.messages.create(messages=messages, **asked)
    assert second.content[0].text == "It is sunny in Rome, 21 degrees."


async def test_langchain_calls_the_weather_tool(openai: AsyncOpenAI) -> None:
    chat = ChatOpenAI(
        model="demo",
        temperature=0,
        use_responses_api=True,
        api_key="none",
        base_url="http://rayfin/v1",
        http_async_client=openai._client,
    )
    agent = chat.bind_tools([FUNCTION])
    messages: list[Any] = [HumanMessage(QUESTION)]
    pieces = [piece async for piece in agent.astream(messages)]
    said = sum(pieces[1:], pieces[0])
    (called,) = said.tool_calls
    assert (called["name"], called["args"]) == ("get_weather", {"city": "Rome"})
    messages += [said, ToolMessage(RESULT, tool_call_id=called["id"])]
    assert (await agent.ainvoke(messages)).text == "It is sunny in Rome, 21 degrees."
    person = await chat.with_structured_output(Person).ainvoke(RECORD)
    assert person == Person(name="Anna", age=34, city="Rome")


@pytest.mark.parametrize("question", [QUESTION, "Repeat these words: apple river stone"])
async def test_a_call_that_is_forced(
    openai: AsyncOpenAI, anthropic: AsyncAnthropic, question: str
) -> None:
    """Whatever the model would rather say, the answer is one call with the schema's arguments."""
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        reply = await openai.responses.create(
            model="demo",
            input=question,
            tools=[FLAT],
            tool_choice=choice,  # type: ignore[arg-type]
            parallel_tool_calls=False,
            temperature=0,
            max_output_tokens=200,
        )
        (called,) = reply.output
        assert reply.status == "completed" and called.type == "function_call"
        assert list(json.loads(called.arguments)) == ["city"]
    for forced in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = await anthropic.messages.create(
            model="demo",
            messages=[{"role": "user", "content": question}],
            tools=[TOOL],
            tool_choice={**forced, "disable_parallel_tool_use": True},  # type: ignore[arg-type]
            max_tokens=200,
            **GREEDY,
        )
        (used,) = message.content
        assert message.stop_reason == "tool_use" and used.type == "tool_use"
        assert list(used.input) == ["city"]


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (RECORD, Person(name="Anna", age=34, city="Rome")),
        ("What is the capital of Italy?", Capital(city="Rome", sure=True)),
    ],
)
async def test_structured_answers(
    openai: AsyncOpenAI, anthropic: AsyncAnthropic, question: str, expected: BaseModel
) -> None:
    """Of a question that the model answers in JSON, and of one that it does not."""
    parsed = await openai.responses.parse(
        model="demo",
        input=question,
        text_format=type(expected),
        temperature=0,
        max_output_tokens=200,
    )
    message = await anthropic.messages.parse(
        model="demo",
        messages=[{"role": "user", "content": question}],
        output_format=type(expected),
        max_tokens=200,
        **GREEDY,
    )
    assert (parsed.status, message.stop_reason) == ("completed", "end_turn")
    assert type(parsed.output_parsed) is type(expected)
    assert parsed.output_parsed == message.parsed_output
    if question == RECORD:
        assert parsed.output_parsed == expected
