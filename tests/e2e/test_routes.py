"""The other routes over a real socket and a real engine, with the clients that people use."""

from typing import Any

import anthropic
import httpx
import openai
import pytest

from rayfin import LLM, SamplingParams

QUESTION = "What is the capital of France?"
CHAT = [{"role": "user", "content": QUESTION}]
LENGTH = 12


@pytest.fixture(scope="module")
def answer(solo: LLM) -> str:
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    return solo.chat(CHAT, params, use_tqdm=False)[0].outputs[0].text


def test_tokens_in_and_tokens_out(app: Any, http: httpx.Client) -> None:
    """What /tokenize says of a conversation completes as the conversation does."""
    ids = http.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
    exact = {"model": app.model, "temperature": 0, "return_token_ids": True, "max_tokens": LENGTH}
    chat = http.post("/v1/chat/completions", json={"messages": CHAT, **exact}).json()
    text = http.post("/v1/completions", json={"prompt": ids, **exact}).json()
    assert chat["prompt_token_ids"] == text["choices"][0]["prompt_token_ids"] == ids
    out = text["choices"][0]["token_ids"]
    assert chat["choices"][0]["token_ids"] == out
    said = http.post("/detokenize", json={"tokens": ids + out}).json()["prompt"]
    assert QUESTION in said and chat["choices"][0]["message"]["content"] in said


def test_responses(app: Any, client: openai.OpenAI, answer: str) -> None:
    asked: dict[str, Any] = {
        "model": app.model,
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": LENGTH,
    }
    made = client.responses.create(**asked)
    assert made.output_text == answer
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == answer
    assert kinds[0] == "response.created" and kinds.count("response.output_text.delta") > 1
    more = client.responses.create(**{**asked, "input": "Hello"}, previous_response_id=made.id)
    assert more.usage.input_tokens > made.usage.input_tokens


def test_a_background_response(app: Any, client: openai.OpenAI, answer: str) -> None:
    """It outlives the connection that asked for it, and its events can be read again."""
    stream = client.responses.create(
        model=app.model,
        input=QUESTION,
        temperature=0,
        max_output_tokens=LENGTH,
        background=True,
        stream=True,
    )
    first = next(iter(stream))
    stream.close()
    rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=0))
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
    assert rest[-1].response.output_text == answer
    endless = client.responses.create(
        model=app.model,
        input=QUESTION,
        background=True,
        extra_body={"ignore_eos": True},
    )
    assert client.responses.cancel(endless.id).status == "cancelled"
    app.idle()


def test_messages(app: Any, answer: str) -> None:
    asked: dict[str, Any] = {
        "model": app.model,
        "messages": CHAT,
        "max_tokens": LENGTH,
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(base_url=app.url, api_key="none", max_retries=0) as client:
        assert client.messages.create(**asked).content[0].text == answer
        with client.messages.stream(**asked) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        assert len(pieces) > 1 and "".join(pieces) == final.content[0].text == answer
        counted = client.messages.count_tokens(model=app.model, messages=CHAT)
        used = final.usage
        read, created = used.cache_read_input_tokens, used.cache_creation_input_tokens
        assert counted.input_tokens == used.input_tokens + read + created
        with pytest.raises(anthropic.BadRequestError, match="max_tokens") as error:
            client.messages.create(**{**asked, "max_tokens": 0})
        assert error.value.body["request_id"] == error.value.response.headers["x-request-id"]
