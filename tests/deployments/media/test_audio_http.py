"""Clips of audio over HTTP: the tokens are those of transformers."""

import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from audio_models import AUDIO, AudioModel, tone, wav
from inline_client import media_service
from rayfin import LLM
from rayfin.actors.media.part import VIRTUAL_TOKENS
from rayfin.deployments.api.app import build_api
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

SETTINGS = {"device": "cpu", "threads": 1, "kv_cache_memory": 10**6, "max_decoding_batch": 4}
OUTPUT = 6
CHAT = {"model": "tiny", "max_tokens": OUTPUT, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["qwen2_audio", "voxtral"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AudioModel:
    return AudioModel(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(tiny: AudioModel) -> Iterator[LLM]:
    with LLM(str(tiny.folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture
async def client(tiny: AudioModel, llm: LLM) -> AsyncIterator[httpx.AsyncClient]:
    settings = MediaSettings(urls=False, max_audios=3, max_seconds=5.0, max_bytes=10**6)
    service = media_service(llm, tiny, settings, tiny.processor.chat_template)
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        client.engine = service.client  # type: ignore[attr-defined]
        yield client


def encoded(seed: int, seconds: float = 0.5) -> str:
    return base64.b64encode(wav(tone(seed, seconds), subtype="FLOAT")).decode()


def part(seed: int, seconds: float = 0.5) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(seed, seconds), "format": "wav"}}


def link(seed: int) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded(seed)}"}}


def said(*parts: Any, family: str) -> list[Any]:
    """A user's parts between what the family's template writes."""
    if family == "voxtral":
        around = [own if isinstance(own, str) else ("[BEGIN_AUDIO]", own) for own in parts]
        flat = [one for own in around for one in (own if isinstance(own, tuple) else (own,))]
        return ["<s>[INST]", *flat, "[/INST]"]
    return ["user: ", *parts, "\nassistant: "]


def expected(tiny: AudioModel, *parts: Any) -> tuple[list[int], list[int]]:
    """Tokens of the prompt as users see them, and of transformers' answer."""
    tokenizer = Tokenizer.load(tiny.folder)
    written = [tokenizer.encode(own, False) if isinstance(own, str) else own for own in parts]
    ids, clips = tiny.prompt(*written)
    shown = [AUDIO if token < VIRTUAL_TOKENS else token for token in ids]
    return shown, tiny.greedy(ids, clips, OUTPUT)


async def test_chat(client: httpx.AsyncClient, tiny: AudioModel) -> None:
    """Two clips between words; usage and prompt_token_ids have the expanded prompt."""
    content = [part(1), {"type": "text", "text": "and"}, link(2), {"type": "text", "text": "?"}]
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    prompt, tokens = expected(tiny, *said(tone(1), "and", tone(2), "?", family=tiny.family))
    answer = reply.json()
    assert answer["prompt_token_ids"] == prompt
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["token_ids"] == tokens


async def test_a_second_question_finds_its_pages(client: httpx.AsyncClient) -> None:
    cached = []
    for question in ("what?", "why?"):
        content = [part(9, 0.9), {"type": "text", "text": question}]
        body = {**CHAT, "messages": [{"role": "user", "content": content}]}
        reply = await client.post("/v1/chat/completions", json=body)
        cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] < 16 <= cached[1]


async def test_tokenize_expands(client: httpx.AsyncClient, tiny: AudioModel) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part(1)]}]}
    reply = await client.post("/tokenize", json=body)
    assert reply.json()["tokens"] == expected(tiny, *said(tone(1), family=tiny.family))[0]


async def test_a_written_place_is_text(client: httpx.AsyncClient, tiny: AudioModel) -> None:
    """What a user writes is never the place of a clip."""
    body = {**CHAT, "messages": [{"role": "user", "content": f"{tiny.processor.token} hello"}]}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200 and AUDIO not in reply.json()["prompt_token_ids"]


def _input(**audio: Any) -> list[Any]:
    return [{"type": "input_audio", "input_audio": audio}]


def _url(url: Any) -> list[Any]:
    return [{"type": "audio_url", "audio_url": {"url": url}}]


WHERE = "messages[0].content[0]"
BAD: dict[str, tuple[list[Any], str, str]] = {
    "not base64": (_input(data="*", format="wav"), f"{WHERE}.input_audio.data", "invalid_audio"),
    "empty": (_input(data="", format="wav"), f"{WHERE}.input_audio.data", "invalid_audio"),
    "no data": (_input(format="wav"), f"{WHERE}.input_audio.data", "invalid_type"),
    "a format": (_input(data="AAAA", format="wma"), f"{WHERE}.input_audio.format",
        "unsupported_content"),
    "no object": ([{"type": "input_audio", "input_audio": "x"}], f"{WHERE}.input_audio",
        "invalid_type"),
    "no audio": (_input(data="aGVsbG8=", format="mp3"), f"{WHERE}.input_audio.data",
        "invalid_audio"),
    "too long": ([part(1, 5.2)], f"{WHERE}.input_audio.data", "invalid_audio"),
    "too many bytes": (_input(data="A" * 1_400_000), f"{WHERE}.input_audio.data", "invalid_audio"),
    "no address": (_url(None), f"{WHERE}.audio_url.url", "invalid_type"),
    "no base64": (_url("data:audio/wav,abc"), f"{WHERE}.audio_url.url", "invalid_audio"),
    "address": (_url("http://example.com/a.wav"), f"{WHERE}.audio_url.url", "media_url_refused"),
    "file": (_url("file:///etc/passwd"), f"{WHERE}.audio_url.url", "media_url_refused"),
    "too many": ([part(1)] * 4, "messages", "too_many_audios"),
    "image": ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        f"{WHERE}.type", "unsupported_content"),
    "video": ([{"type": "video_url", "video_url": {"url": "x"}}], f"{WHERE}.type",
        "unsupported_content"),
    "second of two": ([part(1), *_input(data="AAAA")], "messages[0].content[1]", "invalid_audio"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_bad_parts(client: httpx.AsyncClient, name: str) -> None:
    content, param, code = BAD[name]
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    reply = await client.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, code), error
    assert error["param"].startswith(param)


async def test_openais_client_sends_audio(client: httpx.AsyncClient, tiny: AudioModel) -> None:
    theirs = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=client)
    content: Any = [part(3), {"type": "text", "text": "What?"}]
    answer = await theirs.chat.completions.create(
        model="tiny", max_tokens=2, temperature=0, messages=[{"role": "user", "content": content}]
    )
    prompt, _ = expected(tiny, *said(tone(3), "What?", family=tiny.family))
    assert answer.usage and answer.usage.prompt_tokens == len(prompt)


async def test_prompt_logprobs_and_truncation_are_refused(client: httpx.AsyncClient) -> None:
    for field, value in (("prompt_logprobs", 1), ("truncate_prompt_tokens", 3)):
        body = {**CHAT, "messages": [{"role": "user", "content": [part(1)]}], field: value}
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == field
