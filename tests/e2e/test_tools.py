"""The demo model calls its weather tool: clients of OpenAI's API, unchanged, and ``LLM.chat``."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayfin import LLM, SamplingParams

QUESTION = "What is the weather in Paris?"
ARGUMENTS = {"city": "Paris"}
RESULT = {"temperature": 18, "conditions": "sunny"}
ANSWER = "It is sunny in Paris, 18 degrees."
FUNCTION = {
    "name": "get_weather",
    "description": "Get the current weather for a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}
HELLO = "Hello! I am the Rayfin demo model. How can I help?"


def get_weather(city: str) -> str:
    """Get the current weather for a city."""
    return json.dumps(RESULT) if city == "Paris" else "?"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A package, imported where it connects to the server only."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")
    return importlib.import_module


def check_call(call: Any) -> None:
    assert call.id.startswith("call_") and call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS


@pytest.mark.parametrize("stream", [False, True])
def test_openai(app: Any, client: Any, stream: bool) -> None:
    """An agent of two turns; streamed through the package's own accumulator."""
    settings = {"model": app.model, "tools": TOOLS, "temperature": 0}

    def say(messages: list[Any]) -> Any:
        if not stream:
            return client.chat.completions.create(messages=messages, **settings).choices[0]
        with client.chat.completions.stream(messages=messages, **settings) as events:
            pieces = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
            choice = events.get_final_completion().choices[0]
        calls = choice.message.tool_calls or []
        assert "".join(e.arguments_delta for e in pieces) == "".join(
            call.function.arguments for call in calls
        )
        return choice

    said: list[Any] = [{"role": "user", "content": QUESTION}]
    first = say(said)
    assert first.finish_reason == "tool_calls"
    assert first.message.content == ("" if stream else None)
    (call,) = first.message.tool_calls
    check_call(call)
    said += [
        first.message,
        {"role": "tool", "tool_call_id": call.id, "content": get_weather("Paris")},
    ]
    second = say(said)
    assert (second.finish_reason, second.message.content) == ("stop", ANSWER)
    assert not second.message.tool_calls


@pytest.mark.parametrize(
    ("choice", "question", "reason", "calls", "content"),
    [
        ("auto", "Hello", "stop", 0, HELLO),
        ("none", "Hello", "stop", 0, HELLO),
        ("required", "Hello", "tool_calls", 1, ""),
        (FORCED, QUESTION, "stop", 1, ""),
        ("required", QUESTION, "tool_calls", 1, ""),
    ],
)
def test_tool_choice(
    app: Any, client: Any, choice: Any, question: str, reason: str, calls: int, content: str
) -> None:
    answer = client.chat.completions.create(
        model=app.model,
        messages=[{"role": "user", "content": question}],
        tools=TOOLS,
        tool_choice=choice,
        temperature=0,
        max_tokens=60,
    ).choices[0]
    made = answer.message.tool_calls or []
    assert (answer.finish_reason, len(made), answer.message.content) == (reason, calls, content)
    for call in made:
        assert json.loads(call.function.arguments).keys() == {"city"}


@pytest.mark.parametrize("seed", range(3))
def test_drawn_arguments_always_parse(app: Any, client: Any, seed: int) -> None:
    """At a high temperature, with a strict function: what was not cut follows its schema."""
    function = {**FUNCTION, "strict": True}
    answers = client.chat.completions.create(
        model=app.model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        temperature=1.5,
        seed=seed,
        n=4,
        max_tokens=80,
    )
    for choice in answers.choices:
        made = choice.message.tool_calls or []
        assert made or choice.finish_reason == "length"
        for call in made:
            arguments = json.loads(call.function.arguments)
            assert arguments.keys() == {"city"} and isinstance(arguments["city"], str)


@pytest.mark.parametrize("stream", [False, True])
def test_langchain(app: Any, package: Callable[[str], Any], stream: bool) -> None:
    core = package("langchain_core.messages")
    chat = package("langchain_openai").ChatOpenAI(
        model=app.model,
        temperature=0,
        base_url=f"{app.url}/v1",
        api_key="none",
        max_retries=0,
    )
    chat = chat.bind_tools([get_weather])

    def say(messages: list[Any]) -> Any:
        if not stream:
            return chat.invoke(messages)
        chunks = list(chat.stream(messages))
        return sum(chunks[1:], chunks[0])

    said: list[Any] = [core.HumanMessage(QUESTION)]
    first = say(said)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", ARGUMENTS)
    assert first.response_metadata["finish_reason"] == "tool_calls"
    said += [first, core.ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])]
    assert say(said).content == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_llama_index(app: Any, package: Callable[[str], Any], stream: bool) -> None:
    like, core = package("llama_index.llms.openai_like"), package("llama_index.core.tools")
    llm = like.OpenAILike(
        model=app.model,
        api_base=f"{app.url}/v1",
        api_key="none",
        max_retries=0,
        temperature=0,
        context_window=2048,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    tool = core.FunctionTool.from_defaults(get_weather)
    if stream:
        *_, reply = llm.stream_chat_with_tools([tool], user_msg=QUESTION)
    else:
        reply = llm.chat_with_tools([tool], user_msg=QUESTION)
    (call,) = llm.get_tool_calls_from_response(reply)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", ARGUMENTS)


@pytest.mark.parametrize("choice", [None, "required", FORCED])
def test_offline(solo: LLM, choice: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    settings: dict[str, Any] = {"tools": TOOLS, "use_tqdm": False}
    output = solo.chat(said, params, tool_choice=choice, **settings)[0].outputs[0]
    (call,) = output.tool_calls
    assert call["function"] == {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    assert output.text == "" and output.reasoning is None
    assert output.finish_reason == ("stop" if choice == FORCED else "tool_calls")
    result = {"role": "tool", "tool_call_id": call["id"], "content": get_weather("Paris")}
    said += [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
    last = solo.chat(said, params, **settings)[0].outputs[0]
    assert (last.text, last.tool_calls, last.finish_reason) == (ANSWER, [], "stop")
    plain = solo.chat([{"role": "user", "content": "Hello"}], params, **settings)[0].outputs[0]
    assert (plain.text, plain.tool_calls) == (HELLO, [])


def test_the_agent_of_the_page(app: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 22
    exec(program.replace("http://127.0.0.1:8000", app.url), {})
    assert capsys.readouterr().out.strip() == ANSWER
