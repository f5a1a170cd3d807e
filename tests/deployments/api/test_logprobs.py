"""What the answers say of their tokens and of their prompts, whole and in pieces."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from rayfin.actors.messages import TokenLogprob
from rayfin.deployments.generation import generation
from rayfin.deployments.generation.logprobs import LogprobsWriter
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
REPLY = "Sure — here you go: 👩‍👩‍👧 مرحبا.\n\nEND of it"
PROMPT = "hello world of tokens"
USER = [{"role": "user", "content": "hello"}]
ECHO = {"logprobs": 3, "echo": True}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def completion(http: httpx.AsyncClient, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A choice whole, and the same one joined from a stream."""
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 7, **body}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    events = chunks((await http.post("/v1/completions", json={**body, "stream": True})).text)
    entries = [event["choices"][0]["logprobs"] for event in events]
    joined = {name: [entry for own in entries for entry in own[name]] for name in LISTS}
    texts = [event["choices"][0]["text"] for event in events]
    return whole, {"text": "".join(texts), "logprobs": joined}


def key_of(tokenizer: Tokenizer, token: int) -> str:
    text = tokenizer.token_text(token)
    written = "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token))
    return f"bytes:{written}" if "\ufffd" in text else text


@pytest.mark.parametrize("lease", [1, 3, 50])
@pytest.mark.parametrize("echo", [False, True])
async def test_of_a_completion(
    http: httpx.AsyncClient, engine: Any, tokenizer: Tokenizer, lease: int, echo: bool
) -> None:
    engine.lease = lease
    whole, joined = await completion(http, logprobs=2, echo=echo)
    entries = whole["logprobs"]
    assert joined == {"text": whole["text"], "logprobs": entries}
    prompt = tokenizer.encode(PROMPT) if echo else []
    ids = [*prompt, *engine.reply, engine.eos]
    assert whole["text"] == PROMPT * echo + REPLY
    assert entries["tokens"] == [key_of(tokenizer, token) for token in ids]
    scores = [None, *(-float(i) for i in range(1, len(prompt)))] if echo else []
    assert entries["token_logprobs"] == scores + [-3.0] * (len(ids) - len(prompt))
    for token, offset in zip(entries["tokens"], entries["text_offset"], strict=True):
        if not token.startswith("bytes:") and token != "<|im_end|>":
            assert whole["text"][offset:].startswith(token)
    assert entries["text_offset"] == sorted(entries["text_offset"])
    assert entries["text_offset"][-1] == len(whole["text"])
    names = [tokenizer.token_text(token) for token in (5, 6)]
    for token, top in zip(entries["tokens"][echo:], entries["top_logprobs"][echo:], strict=True):
        assert {name: top[name] for name in names} == {names[0]: -0.25, names[1]: -0.5}
        assert top.keys() == {token, *names}


async def test_minus_infinity_and_ids_for_names(http: httpx.AsyncClient, engine: Any) -> None:
    whole, joined = await completion(http, logprobs=3, return_tokens_as_token_ids=True)
    entries = whole["logprobs"]
    assert joined["logprobs"] == entries
    assert entries["tokens"] == [f"token_id:{token}" for token in [*engine.reply, engine.eos]]
    assert entries["top_logprobs"][0]["token_id:7"] == -9999.0
    whole, _ = await completion(http, logprobs=0)
    assert all(len(top) == 1 for top in whole["logprobs"]["top_logprobs"])


async def test_a_prompt_that_is_only_scored(openai: AsyncOpenAI, engine: Any) -> None:
    reply = await openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    choice, length = reply.choices[0], len(engine.seen[0].prompt)
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs == [None, *(-float(i) for i in range(1, length))]
    assert reply.usage is not None and reply.usage.completion_tokens == 0
    assert engine.seen[0].sampling.prompt_logprobs == 1
    stream = await openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, stream=True
    )
    (chunk,) = [chunk async for chunk in stream]
    whole, piece = choice.model_dump(), chunk.choices[0].model_dump()
    assert piece == {name: whole[name] for name in piece}


async def test_each_choice_of_a_stream_echoes_its_scores(http: httpx.AsyncClient) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "n": 3, "echo": True, "logprobs": 0, "stream": True}
    firsts: dict[int, Any] = {}
    for event in chunks((await http.post("/v1/completions", json=body)).text):
        firsts.setdefault(event["choices"][0]["index"], event["choices"][0]["logprobs"])
    assert firsts.keys() == {0, 1, 2}
    assert len({str(entries["token_logprobs"][:-1]) for entries in firsts.values()}) == 1


@pytest.mark.parametrize("lease", [1, 50])
async def test_of_a_chat(
    openai: AsyncOpenAI, engine: Any, tokenizer: Tokenizer, lease: int
) -> None:
    engine.lease = lease
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 90, "seed": 7}
    asked |= {"logprobs": True, "top_logprobs": 2}
    reply = await openai.chat.completions.create(**asked)
    entries = reply.choices[0].logprobs
    assert entries is not None and entries.content is not None
    assert [own.token for own in entries.content] == [
        tokenizer.token_text(token) for token in [*engine.reply, engine.eos]
    ]
    said = b"".join(bytes(own.bytes or []) for own in entries.content)
    assert said.decode() == f"{REPLY}<|im_end|>"
    for own in entries.content:
        assert own.logprob == -3.0
        assert [(top.token, top.logprob) for top in own.top_logprobs] == [
            (tokenizer.token_text(5), -0.25),
            (tokenizer.token_text(6), -0.5),
        ]
    chunks = [
        (chunk.choices[0].delta.content, chunk.choices[0].logprobs.content or [])
        async for chunk in await openai.chat.completions.create(stream=True, **asked)
        if chunk.choices[0].logprobs is not None
    ]
    assert [own for _, listed in chunks for own in listed] == entries.content
    text, ending = chunks[-1]  # the end has no text, and a chunk of its own
    assert not text and [own.token for own in ending] == ["<|im_end|>"]
    bare = await openai.chat.completions.create(**{**asked, "top_logprobs": None})
    assert bare.choices[0].logprobs is not None
    assert all(not own.top_logprobs for own in bare.choices[0].logprobs.content or [])


async def test_of_prompts_as_vllm_tells_them(
    http: httpx.AsyncClient, engine: Any, tokenizer: Tokenizer
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "prompt_logprobs": 1, "n": 2}
    reply = (await http.post("/v1/completions", json=body)).json()
    ids = engine.seen[0].prompt.tolist()
    for choice in reply["choices"]:
        entries = choice["prompt_logprobs"]
        assert entries[0] is None and len(entries) == len(ids)
        for position, own in list(enumerate(entries))[1:]:
            token = ids[position]
            decoded = tokenizer.token_text(token)
            expected = {"logprob": -float(position), "rank": position, "decoded_token": decoded}
            assert own[str(token)] == expected
            assert own.keys() == {str(token), "5"}
    assert [request.sampling.prompt_logprobs for request in engine.seen] == [1, None]
    body = {"messages": USER, "max_tokens": 2, "prompt_logprobs": 0}
    reply = (await http.post("/v1/chat/completions", json=body)).json()
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]


async def test_nothing_is_told_that_nobody_asked_for(http: httpx.AsyncClient) -> None:
    reply = (await http.post("/v1/completions", json={"prompt": "a"})).json()
    assert reply["choices"][0]["logprobs"] is None
    assert reply["choices"][0]["prompt_logprobs"] is None
    body = {"messages": USER, "logprobs": False, "top_logprobs": 0}
    reply = (await http.post("/v1/chat/completions", json=body)).json()
    assert reply["choices"][0]["logprobs"] is reply["prompt_logprobs"] is None


async def test_of_every_token(http: httpx.AsyncClient, engine: Any) -> None:
    engine.limits = replace(engine.limits, max_logprobs=-1)
    body = {"prompt": PROMPT, "max_tokens": 2, "logprobs": -1, "prompt_logprobs": -1}
    choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert len(choice["logprobs"]["top_logprobs"][0]) == 4  # all that was emitted, and its own
    assert set(choice["prompt_logprobs"][1]) >= {"5", "6", "7"}
    assert engine.seen[0].sampling.logprobs == engine.limits.vocab_size


async def test_an_answer_is_no_larger_than_it_may_be(
    http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts are scored alone, with few tokens beside each of theirs."""
    monkeypatch.setattr(generation, "MAX_PROMPT_LOGPROBS", 120)
    long: dict[str, Any] = {"prompt": [[5] * 30, [6] * 30], "max_tokens": 1}
    for fields, param in (({"prompt_logprobs": 2}, "prompt_logprobs"), (ECHO, "logprobs")):
        error = (await http.post("/v1/completions", json={**long, **fields})).json()["error"]
        assert (error["param"], error["code"]) == (param, "invalid_value")
        assert f" {param} " not in error["message"] and "at most 120" in error["message"]
    assert engine.seen == []
    reply = await http.post("/v1/completions", json={**long, "prompt_logprobs": 1})
    assert [len(choice["prompt_logprobs"]) for choice in reply.json()["choices"]] == [30, 30]


async def test_a_long_answer_is_written_off_the_event_loop(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "LONG_TEXT", 1)
    body = {"prompt": PROMPT, "max_tokens": 5, "logprobs": 1, "seed": 1}
    long = (await http.post("/v1/completions", json=body)).json()
    monkeypatch.undo()
    assert (await http.post("/v1/completions", json=body)).json()["choices"] == long["choices"]


@pytest.mark.parametrize("lease", [1, 4, 50])
async def test_of_an_answer_that_a_stop_string_cuts(
    http: httpx.AsyncClient, engine: Any, lease: int
) -> None:
    """Of the tokens that are given, and no more."""
    engine.lease = lease
    whole, joined = await completion(http, logprobs=1, stop="here", return_token_ids=True)
    assert joined == {"text": whole["text"], "logprobs": whole["logprobs"]}
    assert {len(whole["logprobs"][name]) for name in LISTS} == {len(whole["token_ids"])}
    assert 0 < len(whole["token_ids"]) < len(engine.reply)


def test_tokens_before_a_text_take_no_room_in_it(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.inner.eos_token_id, *tokenizer.encode("hello you", False)]
    entries = LogprobsWriter(tokenizer, 0).echo(ids, {}, "hello you")
    assert entries.text_offset[:2] == [0, 0] and entries.token_logprobs[0] is None
    for token, offset in list(zip(entries.tokens, entries.text_offset, strict=True))[1:]:
        assert "hello you"[offset:].startswith(token)


def test_tokens_with_one_text_have_keys_of_their_own(tokenizer: Tokenizer) -> None:
    """What is likeliest is read from a dict, as lm-eval does; chats have lists with bytes."""
    first, other = tokenizer.encode("今", False)[:2]
    writer = LogprobsWriter(tokenizer, 2)
    for token, logprob in ((first, -0.2), (other, -1.8)):
        entry = TokenLogprob(logprob, 1, ((first, -0.2), (other, -1.8)))
        entries = writer.completion([token], [entry], [0])
        (top,) = entries.top_logprobs
        assert top == {"bytes:\\xe4": -0.2, key_of(tokenizer, other): -1.8}
        assert entries.tokens[0] in top
        assert (max(top, key=top.__getitem__) == entries.tokens[0]) == (token == first)
        listed = writer.chat([token], [entry]).content[0]
        assert [own.bytes for own in listed.top_logprobs] == [
            [0xE4],
            [*tokenizer.token_bytes(other)],
        ]


def test_of_two_tokens_that_are_the_same_text_the_likelier_is_kept() -> None:
    """A letter and its byte."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"A": 256, "B": 257}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.ByteFallback()
    writer = LogprobsWriter(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)), 2)
    for token in (0x41, 256):
        entry = TokenLogprob(-2.0 if token == 0x41 else -1.0, 1, ((256, -1.0), (0x41, -2.0)))
        assert writer.completion([token], [entry], [0]).top_logprobs == [{"A": -1.0}]
