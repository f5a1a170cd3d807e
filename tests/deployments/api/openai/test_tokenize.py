"""/tokenize and /detokenize against the transformers tokenizer itself."""

from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hello 👩‍👩‍👧"}]
PREFILLED = [*HELLO, {"role": "assistant", "content": "here you"}]
TOOL = {"type": "function", "function": {"name": "f"}}


async def tokenize(http: httpx.AsyncClient, **body: Any) -> Any:
    response = await http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", ["", "hello world", "x<|im_end|>\n مرحبا", "a b " * 10_000])
async def test_a_text_and_back(http: httpx.AsyncClient, tokenizer: Tokenizer, text: str) -> None:
    """However long: nothing is generated from it."""
    reply = await tokenize(http, prompt=text, return_token_strs=True, model="tiny")
    ids = tokenizer.inner(text)["input_ids"]
    assert reply == {
        "count": len(ids),
        "max_model_len": 128,
        "tokens": ids,
        "token_strs": tokenizer.inner.convert_ids_to_tokens(ids),
    }
    back = await http.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        (HELLO, {}),
        (HELLO, {"add_generation_prompt": False}),
        (HELLO, {"tools": [TOOL]}),
        (PREFILLED, {"continue_final_message": True}),
        (PREFILLED, {"continue_final_message": True, "add_generation_prompt": False}),
    ],
)
async def test_a_conversation(
    http: httpx.AsyncClient, tokenizer: Tokenizer, messages: Any, fields: Any
) -> None:
    reply = await tokenize(http, messages=messages, **fields)
    settings = {"add_generation_prompt": "continue_final_message" not in fields, **fields}
    expected = tokenizer.inner.apply_chat_template(messages, return_dict=False, **settings)
    assert reply["tokens"] == expected and reply["token_strs"] is None


async def test_it_says_what_the_chat_route_runs(http: httpx.AsyncClient, engine: Any) -> None:
    reply = await tokenize(http, messages=HELLO, chat_template_kwargs={"effort": 5})
    await http.post("/v1/chat/completions", json={"messages": HELLO})
    assert engine.seen[0].prompt.tolist() == reply["tokens"]


async def test_special_tokens(
    http: httpx.AsyncClient, service: OpenAIService, tokenizer: Tokenizer
) -> None:
    """Around a text unless it says no; around a conversation where it asks for them."""
    plain = (await tokenize(http, prompt="hello"))["tokens"]
    chat = (await tokenize(http, messages=HELLO))["tokens"]
    backend = tokenizer.backend
    before = backend.post_processor
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    try:
        assert (await tokenize(http, prompt="hello"))["tokens"] == [0, *plain, 1]
        bare = await tokenize(http, prompt="hello", add_special_tokens=False)
        assert bare["tokens"] == plain
        assert (await tokenize(http, messages=HELLO))["tokens"] == chat
        around = await tokenize(http, messages=HELLO, add_special_tokens=True)
        assert around["tokens"] == [0, *chat, 1]
    finally:
        backend.post_processor = before


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": ["a"]}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "messages", 400),
        ("/tokenize", {"prompt": "a", "model": "gpt-7"}, "model", 404),
        ("/tokenize", {"messages": []}, "messages", 400),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", 400),
        ("/tokenize", {"messages": HELLO, "chat_template": "{{ 7 }}"}, "chat_template", 400),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}, "tools[0].type", 400),
        (
            "/tokenize",
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            400,
        ),
        ("/detokenize", {}, "tokens", 400),
        ("/detokenize", {"tokens": "a"}, "tokens", 400),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]", 400),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]", 400),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]", 400),
        ("/detokenize", {"tokens": [1], "model": "gpt-7"}, "model", 404),
    ],
)
async def test_bad_bodies(
    http: httpx.AsyncClient, path: str, body: Any, param: str, status: int
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


async def test_unknown_fields_are_named(http: httpx.AsyncClient) -> None:
    response = await http.post("/detokenize", json={"tokens": [], "foo": 1})
    assert response.json() == {"prompt": ""}
    assert response.headers["x-rayfin-ignored-fields"] == "foo"
