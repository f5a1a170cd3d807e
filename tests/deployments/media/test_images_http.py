"""Pictures through the three APIs and ``LLM``: the tokens are those of transformers."""

import base64
import io
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx
import httpx2  # of Anthropic's client
import openai
import pytest
from PIL import Image

from inline_client import media_service
from rayfin import LLM, BeamSearchParams, SamplingParams
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.part import VIRTUAL_TOKENS
from rayfin.deployments.api.app import build_api
from rayfin.deployments.api.responses.store import ResponseStore
from rayfin.deployments.api.responses.store_client import ResponseStoreClient
from rayfin.deployments.media.parts import MediaPart
from rayfin.deployments.media.reader import MediaReader
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.text.tokenizer import Tokenizer
from vision_models import IMAGE, VisionModel, picture

pytestmark = pytest.mark.anyio

SETTINGS = {"device": "cpu", "threads": 1, "kv_cache_memory": 10**6, "max_decoding_batch": 4}
OUTPUT = 6


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["llava", "qwen2_vl", "gemma3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return VisionModel(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(tiny: VisionModel) -> Iterator[LLM]:
    with LLM(str(tiny.folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture
async def client(tiny: VisionModel, llm: LLM) -> AsyncIterator[httpx.AsyncClient]:
    service = media_service(llm, tiny, MediaSettings(urls=False, max_images=3))
    app = build_api(service, responses=ResponseStoreClient(store=ResponseStore()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        client.engine, client.app = service.client, app  # type: ignore[attr-defined]
        yield client


def data_url(image: Image.Image, form: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, form)
    return f"data:image/{form.lower()};base64," + base64.b64encode(file.getvalue()).decode()


def expected(tiny: VisionModel, *parts: Any) -> tuple[list[int], list[int]]:
    """Tokens of the prompt as users see them, and of transformers' answer."""
    tokenizer = Tokenizer.load(tiny.folder)
    place = tokenizer.encode("<|vision_start|>", False), tokenizer.encode("<|vision_end|>", False)
    written: list[Any] = []
    for part in parts:
        if isinstance(part, str):
            written.append(tokenizer.encode(part, False))
        elif tiny.family.startswith("qwen"):
            written += [place[0], part, place[1]]
        else:
            written.append(part)
    ids, images = tiny.prompt(*written)
    shown = [IMAGE if token < VIRTUAL_TOKENS else token for token in ids]
    return shown, tiny.greedy(ids, images, OUTPUT)


CHAT = {"model": "tiny", "max_tokens": OUTPUT, "temperature": 0, "return_token_ids": True}


async def test_chat(client: httpx.AsyncClient, tiny: VisionModel) -> None:
    """Two pictures between words; usage and prompt_token_ids have the expanded prompt."""
    content = [
        {"type": "image_url", "image_url": {"url": data_url(picture(1)), "detail": "low"}},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": data_url(picture(2, 30, 50))}},
        {"type": "text", "text": "differ how?"},
    ]
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    prompt, tokens = expected(
        tiny, "user: ", picture(1), "and", picture(2, 30, 50), "differ how?\nassistant: "
    )
    answer = reply.json()
    assert answer["prompt_token_ids"] == prompt
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["token_ids"] == tokens


async def test_stream_and_second_question(client: httpx.AsyncClient, tiny: VisionModel) -> None:
    """A second question about the same picture finds its pages."""
    image = {"type": "image_url", "image_url": {"url": data_url(picture(9, 60, 60))}}
    cached = []
    for question in ("what?", "why?"):
        content = [image, {"type": "text", "text": question}]
        body = {**CHAT, "messages": [{"role": "user", "content": content}], "stream": True}
        body["stream_options"] = {"include_usage": True}
        reply = await client.post("/v1/chat/completions", json=body)
        chunks = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        last = json.loads(chunks[-1])
        cached.append(last["usage"]["prompt_tokens_details"]["cached_tokens"])
        tokens = [
            token
            for chunk in chunks
            for choice in json.loads(chunk)["choices"]
            for token in choice.get("token_ids") or ()
        ]
        assert tokens == expected(tiny, "user: ", picture(9, 60, 60), f"{question}\nassistant: ")[1]
    assert cached[0] < 16 <= cached[1] or tiny.family == "llava"


async def test_anthropic(client: httpx.AsyncClient, tiny: VisionModel) -> None:
    source = {"type": "base64", "media_type": "image/png"}
    source["data"] = data_url(picture(3)).partition(",")[2]
    content = [
        {"type": "text", "text": "see"},
        {"type": "image", "source": source},
        {"type": "text", "text": "so?"},
    ]
    body = {"model": "tiny", "max_tokens": OUTPUT, "temperature": 0}
    body["messages"] = [{"role": "user", "content": content}]
    reply = await client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    prompt, tokens = expected(tiny, "user: see", picture(3), "so?\nassistant: ")
    used = reply.json()["usage"]
    assert used["output_tokens"] == len(tokens)
    assert used["input_tokens"] + used["cache_read_input_tokens"] + used.get(
        "cache_creation_input_tokens", 0
    ) == len(prompt)


async def test_responses_keep_their_images(client: httpx.AsyncClient, tiny: VisionModel) -> None:
    content = [
        {"type": "input_text", "text": "look"},
        {"type": "input_image", "image_url": data_url(picture(4))},
    ]
    body = {"model": "tiny", "max_output_tokens": OUTPUT, "temperature": 0}
    first = await client.post(
        "/v1/responses", json={**body, "input": [{"role": "user", "content": content}]}
    )
    assert first.status_code == 200, first.text
    prompt, _ = expected(tiny, "user: look", picture(4), "\nassistant: ")
    assert first.json()["usage"]["input_tokens"] == len(prompt)
    second = await client.post(
        "/v1/responses",
        json={**body, "input": "again", "previous_response_id": first.json()["id"]},
    )
    assert second.status_code == 200, second.text
    engine: Any = client.engine  # type: ignore[attr-defined]
    assert [len(request.parts) for request in engine.seen] == [1, 1]
    assert engine.seen[0].parts[0].digest == engine.seen[1].parts[0].digest


async def test_tools_may_give_images(client: httpx.AsyncClient, tiny: VisionModel) -> None:
    """In Anthropic's messages and in responses: the prompt has the picture in its place.

    The template has none for calls and results, so they are written into messages.
    """
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    before = f"user: hi\nassistant: {call}\nuser: <tool_response>see"
    prompt, _ = expected(tiny, before, picture(5), "</tool_response>\nassistant: ")
    url = data_url(picture(5))
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    shown = [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": shown}],
        },
    ]
    body = {"model": "tiny", "messages": messages}
    reply = await client.post("/v1/messages/count_tokens", json=body)
    assert reply.json() == {"input_tokens": len(prompt)}, reply.text
    given = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url}]
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t", "output": given},
    ]
    body = {"model": "tiny", "input": items, "max_output_tokens": 2, "store": True}
    first = await client.post("/v1/responses", json=body)
    assert first.json()["usage"]["input_tokens"] == len(prompt), first.text
    more = {"model": "tiny", "input": "so?", "previous_response_id": first.json()["id"]}
    second = await client.post("/v1/responses", json={**more, "max_output_tokens": 2})
    assert second.status_code == 200, second.text
    engine: Any = client.engine  # type: ignore[attr-defined]
    assert [len(request.parts) for request in engine.seen] == [1, 1]


async def test_tokenize_expands(client: httpx.AsyncClient, tiny: VisionModel) -> None:
    content = [{"type": "image_url", "image_url": data_url(picture(1))}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    reply = await client.post("/tokenize", json=body)
    assert reply.json()["tokens"] == expected(tiny, "user: ", picture(1), "\nassistant: ")[0]


async def test_a_written_place_is_text(client: httpx.AsyncClient, tiny: VisionModel) -> None:
    """What a user writes is never a place of an image."""
    content = f"{tiny.processor.token} hello"
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200 and IMAGE not in reply.json()["prompt_token_ids"]


GOOD = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}
BAD: dict[str, tuple[list[Any], str, str]] = {
    "not base64": ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}}],
        "messages[0].content[0].image_url.url", "invalid_image"),
    "no base64": ([{"type": "image_url", "image_url": {"url": "data:image/png,abc"}}],
        "messages[0].content[0].image_url.url", "invalid_image"),
    "empty": ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
        "messages[0].content[0].image_url.url", "invalid_image"),
    "no image": ([{"type": "image_url", "image_url": "data:image/png;base64,aGVsbG8="}],
        "messages[0].content[0]", "invalid_image"),
    "no address": ([{"type": "image_url", "image_url": {}}],
        "messages[0].content[0].image_url.url", "invalid_type"),
    "address": ([{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}],
        "messages[0].content[0].image_url.url", "media_url_refused"),
    "file": ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
        "messages[0].content[0].image_url.url", "media_url_refused"),
    "too many": ([GOOD] * 4, "messages", "too_many_images"),
    "audio": ([{"type": "input_audio", "input_audio": {}}],
        "messages[0].content[0].type", "unsupported_content"),
    "video": ([{"type": "video_url", "video_url": {"url": "x"}}],
        "messages[0].content[0].type", "unsupported_content"),
    "file_id": ([{"type": "input_image", "file_id": "f"}],
        "messages[0].content[0].file_id", "unsupported_content"),
    "embeds": ([{"type": "image_embeds", "image_embeds": "AAAA"}],
        "messages[0].content[0].type", "unsupported_content"),
    "a picture of Python's": ([{"type": "image_pil", "image_pil": "x"}],
        "messages[0].content[0]", "invalid_type"),
    "transformers' file": ([{"type": "image", "image": "file:///etc/passwd"}],
        "messages[0].content[0].image", "media_url_refused"),
    "second of two": ([GOOD, {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}],
        "messages[0].content[1]", "invalid_image"),
    "no part": ([GOOD, "x"], "messages[0].content[1]", "invalid_type"),
    "no source": ([{"type": "image"}], "messages[0].content[0].image_url", "invalid_type"),
    "source of a kind": ([{"type": "image", "source": {"type": "file", "file_id": "f"}}],
        "messages[0].content[0].source.type", "unsupported_content"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_bad_parts(client: httpx.AsyncClient, name: str) -> None:
    content, param, code = BAD[name]
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    reply = await client.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, code), error
    assert error["param"].startswith(param)


async def test_an_expanded_prompt_over_the_context(client: httpx.AsyncClient) -> None:
    """Its text alone would fit."""
    content = [GOOD] * 3 + [{"type": "text", "text": "x" * 480}]
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    reply = await client.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert error["param"] == "messages" and "512" in error["message"]
    (given,) = re.findall(r"it has (\d+) tokens", error["message"])
    assert int(given) >= 480 + 3 * 16


async def test_a_text_too_long_is_refused_before_its_images_are_read(
    client: httpx.AsyncClient, tiny: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(MediaReader, "process", read)
    content = [GOOD, {"type": "text", "text": "x" * 10**5}]
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_bytes_are_decoded_off_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    real = MediaPart.file

    def file(part: MediaPart) -> bytes:
        threads.add(threading.current_thread().name)
        return real(part)

    monkeypatch.setattr(MediaPart, "file", file)
    body = {**CHAT, "messages": [{"role": "user", "content": [GOOD, GOOD]}]}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert threads and all(name.startswith("media") for name in threads)


async def test_a_clients_name_of_an_image_is_ignored(client: httpx.AsyncClient) -> None:
    """A header names it: another's image could have that name."""
    engine: Any = client.engine  # type: ignore[attr-defined]
    other = {"type": "image_url", "image_url": {"url": data_url(picture(2))}}
    for part in (GOOD, other):
        body = {**CHAT, "messages": [{"role": "user", "content": [{**part, "uuid": "mine"}]}]}
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-rayfin-ignored-fields"] == "messages.content.uuid"
    first, second = (request.parts[0].digest for request in engine.seen)
    assert first != second
    body = {**CHAT, "messages": [{"role": "user", "content": [GOOD]}]}
    reply = await client.post("/v1/chat/completions", json=body)
    assert "x-rayfin-ignored-fields" not in reply.headers


async def test_clients_of_others_send_pictures(client: httpx.AsyncClient) -> None:
    """OpenAI's and Anthropic's own, in the forms that their documents have."""
    engine: Any = client.engine  # type: ignore[attr-defined]
    url, ask = data_url(picture(6)), {"type": "text", "text": "What?"}
    theirs = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=client)
    shown: Any = [{"type": "image_url", "image_url": {"url": url, "detail": "high"}}, ask]
    await theirs.chat.completions.create(
        model="tiny", max_tokens=2, messages=[{"role": "user", "content": shown}]
    )
    given: Any = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": "What?"},
    ]
    await theirs.responses.create(
        model="tiny", max_output_tokens=2, input=[{"role": "user", "content": given}]
    )
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks: Any = [{"type": "image", "source": source}, ask]
    transport: Any = httpx2.ASGITransport(client.app)  # type: ignore[attr-defined]
    async with httpx2.AsyncClient(transport=transport) as own:
        others = anthropic.AsyncAnthropic(base_url="http://test", api_key="-", http_client=own)
        await others.messages.create(
            model="tiny", max_tokens=2, messages=[{"role": "user", "content": blocks}]
        )
    assert len({tuple(request.prompt) for request in engine.seen}) == 1
    assert [len(request.parts) for request in engine.seen] == [1, 1, 1]


async def test_langchain_sends_pictures(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its standard form of a picture."""
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        model="tiny", base_url="http://test/v1", api_key="-", http_async_client=client, max_tokens=2
    )
    data = data_url(picture(6)).partition(",")[2]
    shown = {"type": "image", "base64": data, "mime_type": "image/png"}
    await chat.ainvoke([("user", [shown, {"type": "text", "text": "What?"}])])
    engine: Any = client.engine  # type: ignore[attr-defined]
    assert [len(request.parts) for request in engine.seen] == [1]


async def test_images_and_refusals_are_counted(tiny: VisionModel) -> None:
    reader = MediaReader(tiny.processor, MediaSettings(urls=False, max_images=3))
    await reader.read([{"role": "user", "content": [GOOD, GOOD]}], "messages")
    await reader.read([{"role": "user", "content": "hello"}], "messages")
    with pytest.raises(InvalidRequest):
        await reader.read([{"role": "user", "content": [GOOD] * 4}], "messages")
    assert (reader.counts.images.count, reader.counts.images.sum) == (1, 2)
    assert reader.counts.refusals["too_many_images"] == 1


async def test_prompt_logprobs_and_truncation_are_refused(client: httpx.AsyncClient) -> None:
    for field, value in (("prompt_logprobs", 1), ("truncate_prompt_tokens", 3)):
        body = {**CHAT, "messages": [{"role": "user", "content": [GOOD]}], field: value}
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == field


def test_llm_methods_without_images(llm: LLM) -> None:
    """They must not answer as if the picture were not there."""
    prompt = {"prompt": "x", "multi_modal_data": {"image": picture(1)}}
    with pytest.raises(InvalidRequest, match="only generate and chat") as caught:
        llm.beam_search(["x", prompt], BeamSearchParams(2, max_tokens=2))
    assert caught.value.param == "prompt[1].multi_modal_data"
    with pytest.raises(InvalidRequest, match="only generate and chat"):
        llm.encode([prompt], pooling_task="token_embed", use_tqdm=False)


def test_llm(llm: LLM, tiny: VisionModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT)
    prompt, tokens = expected(tiny, "what ", picture(1), " is")
    place = tiny.processor.token
    if tiny.family.startswith("qwen"):
        place = f"<|vision_start|>{place}<|vision_end|>"
    data = {"prompt": f"what {place} is", "multi_modal_data": {"image": picture(1)}}
    (output,) = llm.generate(data, params, use_tqdm=False)
    assert output.prompt_token_ids == prompt and output.outputs[0].token_ids == tokens
    content = [
        {"type": "image_pil", "image_pil": picture(2)},
        {"type": "text", "text": "hm"},
        {"type": "image_url", "image_url": {"url": data_url(picture(3))}},
    ]
    (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    prompt, tokens = expected(tiny, "user: ", picture(2), "hm", picture(3), "\nassistant: ")
    assert output.prompt_token_ids == prompt and output.outputs[0].token_ids == tokens
