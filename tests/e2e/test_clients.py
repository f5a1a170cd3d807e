"""Programs written for OpenAI and Anthropic, unchanged but for the address: one conversation.

What each package makes of it must be what the model says in this process, turn by turn.
"""

import asyncio
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayfin import LLM, SamplingParams

LENGTH = 48
UNICODE = "Repeat: Grüße 🎉 日本 👩‍👩‍👧 مرحبا"
QUESTIONS = ["Hi! I'm Priya.", "What is my name?", "What is 12 + 30?", UNICODE, "Count to 12."]
KNOWN = ["Nice to meet you, Priya!", "Your name is Priya.", "12 + 30 = 42", None, None]
PROMPTS = ["The capital of France is", "🎉 🦊 Grüße, 日本:"]

Messages = list[dict[str, str]]
Say = Callable[[Messages], str]


@pytest.fixture(scope="module")
def answers(solo: LLM) -> list[str]:
    """What the model says to each question, after all that was said before."""
    said: list[Any] = []
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    for question, known in zip(QUESTIONS, KNOWN, strict=True):
        said.append({"role": "user", "content": question})
        text = solo.chat(said, params, use_tqdm=False)[0].outputs[0].text
        assert known in (None, text)
        said.append({"role": "assistant", "content": text})
    return [message["content"] for message in said[1::2]]


@pytest.fixture(scope="module")
def completions(solo: LLM) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    return [output.outputs[0].text for output in solo.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients connect to the server only: no proxy, no telemetry."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")


@pytest.fixture
def package(alone: None) -> Callable[[str], Any]:
    """A package, imported where nothing of it can call home."""
    return importlib.import_module


@pytest.fixture
def client(app: Any, package: Any) -> Iterator[Any]:
    with package("openai").OpenAI(**to(app)) as client:
        yield client


def to(app: Any) -> dict[str, Any]:
    return {"base_url": f"{app.url}/v1", "api_key": "none", "max_retries": 0}


def converse(say: Say, answers: list[str]) -> None:
    """Asks every question with all that was said before."""
    said: Messages = []
    for question, answer in zip(QUESTIONS, answers, strict=True):
        said.append({"role": "user", "content": question})
        assert say(said) == answer, question
        said.append({"role": "assistant", "content": answer})


@pytest.mark.parametrize("stream", [False, True])
def test_openai(app: Any, client: Any, answers: list[str], stream: bool) -> None:
    settings = {"model": app.model, "temperature": 0, "max_completion_tokens": LENGTH}

    def whole(messages: Messages) -> str:
        reply = client.chat.completions.create(messages=messages, **settings)
        assert reply.choices[0].finish_reason == "stop" and reply.usage.completion_tokens > 1
        return str(reply.choices[0].message.content)

    def streamed(messages: Messages) -> str:
        with client.chat.completions.stream(messages=messages, **settings) as events:
            text = "".join(event.delta for event in events if event.type == "content.delta")
            assert events.get_final_completion().choices[0].message.content == text
        return text

    converse(streamed if stream else whole, answers)


def test_async_openai(app: Any, package: Any, answers: list[str]) -> None:
    """Two conversations at a time, one of them streamed."""
    openai = package("openai")
    settings = {"model": app.model, "temperature": 0, "max_tokens": LENGTH}

    async def whole(client: Any, messages: Messages) -> str:
        reply = await client.chat.completions.create(messages=messages, **settings)
        return str(reply.choices[0].message.content)

    async def streamed(client: Any, messages: Messages) -> str:
        chunks = await client.chat.completions.create(messages=messages, stream=True, **settings)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def ask(messages: Messages) -> list[str]:
        async with openai.AsyncOpenAI(**to(app)) as client:
            return await asyncio.gather(whole(client, messages), streamed(client, messages))

    def both(messages: Messages) -> str:
        text, same = asyncio.run(ask(messages))
        assert text == same
        return text

    converse(both, answers)


def test_openai_completions(app: Any, client: Any, completions: list[str]) -> None:
    settings = {"model": app.model, "temperature": 0, "max_tokens": LENGTH}
    reply = client.completions.create(prompt=PROMPTS, echo=True, **settings)
    texts = [choice.text for choice in reply.choices]
    assert texts == [a + b for a, b in zip(PROMPTS, completions, strict=True)]
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(prompt=PROMPTS, echo=True, stream=True, **settings):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses(app: Any, client: Any, answers: list[str], stream: bool) -> None:
    """The server remembers the conversation; what it has stored is what it said."""
    settings = {"model": app.model, "temperature": 0, "max_output_tokens": LENGTH}
    previous: str | None = None
    for question, answer in zip(QUESTIONS, answers, strict=True):
        asked = {"input": question, "previous_response_id": previous, **settings}
        if stream:
            with client.responses.stream(**asked) as events:
                pieces = [e.delta for e in events if e.type == "response.output_text.delta"]
                reply = events.get_final_response()
            assert "".join(pieces) == answer
        else:
            reply = client.responses.create(**asked)
        assert (reply.status, reply.output_text) == ("completed", answer)
        assert client.responses.retrieve(reply.id).output_text == answer
        previous = reply.id
    items = client.responses.input_items.list(previous, order="asc")
    assert [item.content[0].text for item in items if item.role == "user"] == QUESTIONS


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic(app: Any, package: Any, answers: list[str], stream: bool) -> None:
    settings = {"model": app.model, "max_tokens": LENGTH, "extra_body": {"temperature": 0}}
    with package("anthropic").Anthropic(base_url=app.url, api_key="none", max_retries=0) as client:

        def whole(messages: Messages) -> str:
            reply = client.messages.create(messages=messages, **settings)
            assert reply.stop_reason == "end_turn"
            return str(reply.content[0].text)

        def streamed(messages: Messages) -> str:
            with client.messages.stream(messages=messages, **settings) as events:
                text = "".join(events.text_stream)
                assert events.get_final_text() == text
            return text

        converse(streamed if stream else whole, answers)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(app: Any, package: Any, answers: list[str], responses: bool) -> None:
    """invoke, stream and batch, over chat completions and over responses."""
    chat = package("langchain_openai").ChatOpenAI(
        model=app.model,
        temperature=0,
        max_tokens=LENGTH,
        use_responses_api=responses,
        stream_usage=True,
        **to(app),
    )

    def say(messages: Messages) -> str:
        reply = chat.invoke(messages)
        chunks = list(chat.stream(messages))
        whole = sum(chunks[1:], chunks[0])
        assert len(chunks) > 3 and whole.text == reply.text
        assert whole.usage_metadata["output_tokens"] == reply.usage_metadata["output_tokens"]
        return str(reply.text)

    converse(say, answers)
    first, second = chat.batch([QUESTIONS[0], [("user", QUESTIONS[2])]])
    assert first.text == answers[0] and second.text == answers[2]


def test_langchain_completions(app: Any, package: Any, completions: list[str]) -> None:
    llm = package("langchain_openai").OpenAI(
        model=app.model, temperature=0, max_tokens=LENGTH, **to(app)
    )
    assert llm.batch(PROMPTS) == completions
    assert [llm.invoke(prompt) for prompt in PROMPTS] == completions
    assert ["".join(llm.stream(prompt)) for prompt in PROMPTS] == completions


@pytest.fixture
def llama(app: Any, alone: None) -> Callable[..., Any]:
    """Makes LlamaIndex's client."""
    from llama_index.llms import openai_like as like

    def make(**settings: Any) -> Any:
        settings = {"temperature": 0, "max_tokens": LENGTH, "context_window": 2048, **settings}
        address = {"api_base": f"{app.url}/v1", "api_key": "none", "max_retries": 0}
        return like.OpenAILike(model=app.model, **address, **settings)

    return make


@pytest.mark.parametrize("stream", [False, True])
def test_llama_index(llama: Callable[..., Any], answers: list[str], stream: bool) -> None:
    from llama_index.core.llms import ChatMessage

    llm = llama(is_chat_model=True)

    def say(messages: Messages) -> str:
        asked = [ChatMessage(**message) for message in messages]
        if not stream:
            return str(llm.chat(asked).message.content)
        replies = list(llm.stream_chat(asked))
        text = "".join(reply.delta or "" for reply in replies)
        assert replies[-1].message.content == text
        return text

    converse(say, answers)


def test_llama_index_completions(llama: Callable[..., Any], completions: list[str]) -> None:
    llm = llama()
    assert [llm.complete(prompt).text for prompt in PROMPTS] == completions
    pieces = [[reply.delta for reply in llm.stream_complete(prompt)] for prompt in PROMPTS]
    assert ["".join(own) for own in pieces] == completions


def ask_openai(package: Any, app: Any, model: str, text: str) -> None:
    with package("openai").OpenAI(**to(app)) as client:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])


def ask_openai_responses(package: Any, app: Any, model: str, text: str) -> None:
    with package("openai").OpenAI(**to(app)) as client:
        client.responses.create(model=model, input=text)


def ask_anthropic(package: Any, app: Any, model: str, text: str) -> None:
    settings = {"base_url": app.url, "api_key": "none", "max_retries": 0}
    with package("anthropic").Anthropic(**settings) as client:
        messages = [{"role": "user", "content": text}]
        client.messages.create(model=model, max_tokens=9, messages=messages)


def ask_langchain(package: Any, app: Any, model: str, text: str) -> None:
    package("langchain_openai").ChatOpenAI(model=model, **to(app)).invoke(text)


LANGCHAINS = "langchain_core.exceptions:ContextOverflowError"


@pytest.mark.parametrize(
    ("ask", "unknown", "too_long"),
    [
        (ask_openai, "openai:NotFoundError", "openai:BadRequestError"),
        (ask_openai_responses, "openai:NotFoundError", "openai:BadRequestError"),
        (ask_anthropic, "anthropic:NotFoundError", "anthropic:BadRequestError"),
        (ask_langchain, "openai:NotFoundError", LANGCHAINS),
    ],
)
def test_errors_are_of_the_packages_own_classes(
    app: Any, package: Any, ask: Callable[..., None], unknown: str, too_long: str
) -> None:
    for model, text, expected in (
        ("gpt-7", "Hello", unknown),
        (app.model, "word " * 5000, too_long),
    ):
        module, _, name = expected.partition(":")
        with pytest.raises(getattr(package(module), name)) as error:
            ask(package, app, model, text)
        words = ("gpt-7",) if model == "gpt-7" else ("context length", "prompt is too long")
        assert any(word in str(error.value) for word in words)


def test_streams_of_any_bytes_join_to_the_whole(app: Any, client: Any) -> None:
    """Bytes of an emoji in any order: emoji and what is no text come out alike, streamed or not."""
    with app.client() as http:
        emoji = {"prompt": "🎉", "add_special_tokens": False}
        allowed = http.post("/tokenize", json=emoji).raise_for_status().json()["tokens"]
    assert len(allowed) > 1, "one token cannot be split"
    settings = {"ignore_eos": True, "return_token_ids": True, "allowed_token_ids": allowed}
    texts = ""
    for seed in range(4):
        asked = {
            "model": app.model,
            "prompt": "🎉🦊" * 6,
            "temperature": 2,
            "seed": seed,
            "max_tokens": 200,
            "extra_body": settings,
        }
        whole = client.completions.create(**asked)
        options = {"include_usage": True}
        *chunks, last = client.completions.create(stream=True, stream_options=options, **asked)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        tokens = [token for chunk in chunks for token in chunk.choices[0].token_ids]
        assert tokens == whole.choices[0].token_ids
        assert len(tokens) == last.usage.completion_tokens == whole.usage.completion_tokens == 200
        assert last.usage.prompt_tokens == whole.usage.prompt_tokens
        texts += whole.choices[0].text
    assert "🎉" in texts and "\ufffd" in texts


def test_a_stop_string_never_shows_wherever_tokens_split(app: Any, client: Any) -> None:
    """Stops of four characters all over an answer, streamed and whole."""
    asked = {"model": app.model, "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 24}
    asked["extra_body"] = {"ignore_eos": True}
    text = client.completions.create(**asked).choices[0].text
    for stop in sorted({text[i : i + 4] for i in range(0, len(text) - 4, 5)}):
        whole = client.completions.create(stop=stop, **asked).choices[0]
        chunks = list(client.completions.create(stop=stop, stream=True, **asked))
        joined = "".join(chunk.choices[0].text for chunk in chunks)
        assert joined == whole.text == text[: text.index(stop)], stop
        assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
