"""Speech over HTTP: the prompt is the processor's own, the answer transformers' own."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from audio_models import FAMILIES, AudioModel, text_of, tone, wav
from rayfin.deployments.api.audio.transcript import HeardText
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

OUTPUT = 6
CLIP = tone(1, 0.8)
FILE = wav(CLIP, subtype="FLOAT")


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AudioModel:
    return AudioModel(request.param, tmp_path_factory.mktemp(request.param))


TEXTS = {  # what is around the clip of a transcription, and of a translation
    "qwen2_audio": (
        ("user: ", "Transcribe the speech in this audio. Answer with the transcript alone."),
        "\nassistant: ",
    ),
    "voxtral": (("<s>[INST][BEGIN_AUDIO]", "[/INST]"), "[TRANSCRIBE]"),
    "glmasr": (("user: ", "Please transcribe this audio into text"), "\nassistant: "),
    "qwen3_asr": (("user: ", ""), "\nassistant: "),
    "audioflamingo3": (("user: Transcribe the input speech.", ""), "\nassistant: "),
}


def expected(tiny: AudioModel, *parts: Any) -> tuple[list[int], str]:
    """The tokens that an engine gets, and the text of transformers' answer."""
    tokenizer = Tokenizer.load(tiny.folder)
    written = [tokenizer.encode(own, False) if isinstance(own, str) else own for own in parts]
    ids, clips = tiny.prompt(*written)
    return ids, text_of(tokenizer, tiny.greedy(ids, clips, OUTPUT), OUTPUT)


def fields(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_completion_tokens": str(OUTPUT), **more}


async def post(client: httpx.AsyncClient, task: str = "transcriptions", **more: Any) -> Any:
    files = {"file": ("speech.wav", FILE, "audio/wav")}
    return await client.post(f"/v1/audio/{task}", data=fields(**more), files=files)


async def test_transcription(client: httpx.AsyncClient, tiny: AudioModel) -> None:
    """The clip in the processor's own prompt, greedily; usage says how long it is."""
    (before, behind), end = TEXTS[tiny.family]
    ids, text = expected(tiny, before, CLIP, behind + end)
    reply = await post(client)
    assert reply.status_code == 200, reply.text
    assert reply.json() == {"text": text, "usage": {"type": "duration", "seconds": 1}}
    engine: Any = client.engine  # type: ignore[attr-defined]
    assert engine.seen[-1].prompt.tolist() == ids


async def test_the_processors_own_prompt(client: httpx.AsyncClient, tiny: AudioModel) -> None:
    """As transformers' processor writes it, for the families that have one."""
    inner = tiny.processor._processor
    if not hasattr(inner, "apply_transcription_request"):
        pytest.skip("it has none")
    made = inner.apply_transcription_request([CLIP])
    await post(client)
    engine: Any = client.engine  # type: ignore[attr-defined]
    seen = engine.seen[-1].prompt
    assert [max(token, 3) if token < 0 else token for token in seen.tolist()] == made["input_ids"][
        0
    ].tolist()


async def test_language_and_hint(client: httpx.AsyncClient, tiny: AudioModel) -> None:
    if tiny.family == "qwen3_asr":
        pytest.skip("its own form is below")
    (before, behind), end = TEXTS[tiny.family]
    reply = await post(client, language="de", prompt="Names: Ada <|AUDIO|>")
    assert reply.status_code == 200, reply.text
    engine: Any = client.engine  # type: ignore[attr-defined]
    shown = [token for token in engine.seen[-1].prompt.tolist() if token >= 0]
    text = Tokenizer.load(tiny.folder).decode(shown, False)
    if tiny.family == "voxtral":
        assert text == f"{before}{behind}lang:de{end}"
        assert reply.headers["x-rayfin-ignored-fields"] == "prompt"
    else:
        hint = " The language of the speech is de.\nNames: Ada <|AUDIO|>"
        assert text == (before + behind).rstrip() + hint + end
        assert len(engine.seen[-1].parts) == 1
        assert "x-rayfin-ignored-fields" not in reply.headers


async def test_qwens_own_form(
    client: httpx.AsyncClient, tiny: AudioModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hint is the system's message, a language begins the answer; no hint opens a turn."""
    if tiny.family != "qwen3_asr":
        pytest.skip("another family")
    assert (await post(client, language="de", prompt="Ada")).status_code == 200
    engine: Any = client.engine  # type: ignore[attr-defined]
    shown = [token for token in engine.seen[-1].prompt.tolist() if token >= 0]
    text = Tokenizer.load(tiny.folder).decode(shown, False)
    assert text == "system: Ada\nuser: \nassistant: language German<asr_text>"
    known: Any = client.tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(vars(known), "paired_tags", re.compile("</?note>"))
    for field, value in (("language", "xx"), ("prompt", "<|audio_pad|>"), ("prompt", "a <note>")):
        reply = await post(client, **{field: value})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == field


def test_a_language_before_the_transcript() -> None:
    """It is found piece by piece; an answer without the mark is the transcript."""
    heard = HeardText("<asr_text>")
    pieces = [heard.push(own) for own in ("language ", "German<asr", "_text>Guten ", "Tag")]
    assert pieces == ["", "", "Guten ", "Tag"] and heard.push("", last=True) == ""
    assert (heard.language, heard.text) == ("German", "Guten Tag")
    heard = HeardText("<asr_text>")
    assert heard.push("Guten Tag") == "" and heard.push(".", last=True) == "Guten Tag."
    long = HeardText("<asr_text>")
    assert long.push("a" * 65) == "a" * 65 and long.push("b") == "b" and long.language is None
    plain = HeardText("")
    assert plain.push("a") == "a" and plain.text == "a"


async def test_translation(client: httpx.AsyncClient, tiny: AudioModel) -> None:
    reply = await post(client, "translations", response_format="verbose_json")
    answer = reply.json()
    assert (answer["task"], answer["duration"], answer["language"]) == ("translate", 0.8, None)
    engine: Any = client.engine  # type: ignore[attr-defined]
    shown = [token for token in engine.seen[-1].prompt.tolist() if token >= 0]
    text = Tokenizer.load(tiny.folder).decode(shown, False)
    assert "Translate the speech in this audio into English." in text


async def test_formats(client: httpx.AsyncClient) -> None:
    plain = (await post(client)).json()
    text = await post(client, response_format="text")
    assert text.text == plain["text"] and text.headers["content-type"].startswith("text/plain")
    verbose = (await post(client, response_format="verbose_json", language="en")).json()
    usage = {"type": "duration", "seconds": 1}
    own = {"task": "transcribe", "language": "en", "duration": 0.8, "usage": usage}
    assert {name: verbose[name] for name in own} == own


async def test_stream(client: httpx.AsyncClient) -> None:
    """Events of OpenAI's that hold vLLM's members too."""
    whole = (await post(client)).json()["text"]
    reply = await post(client, stream="true")
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    *deltas, done = map(json.loads, lines[:-1])
    assert "".join(own["delta"] for own in deltas) == whole == done["text"]
    assert "".join(own["choices"][0]["delta"]["content"] for own in deltas) == whole
    assert {own["object"] for own in [*deltas, done]} == {"transcription.chunk"}
    assert done["choices"][0]["finish_reason"] in ("length", "stop")
    assert done["usage"]["output_tokens"] <= OUTPUT
    assert (
        done["usage"]["total_tokens"]
        == done["usage"]["prompt_tokens"] + (done["usage"]["completion_tokens"])
    )


async def test_openais_client(client: httpx.AsyncClient) -> None:
    theirs = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=client)
    upload = ("speech.wav", FILE)
    limit: Any = {"max_completion_tokens": OUTPUT}
    made = await theirs.audio.transcriptions.create(model="tiny", file=upload, extra_body=limit)
    assert made.text == (await post(client)).json()["text"]
    stream = await theirs.audio.transcriptions.create(
        model="tiny", file=upload, stream=True, extra_body=limit
    )
    events = [own async for own in stream]
    assert events[-1].type == "transcript.text.done" and events[-1].text == made.text
    translated = await theirs.audio.translations.create(model="tiny", file=upload, extra_body=limit)
    assert isinstance(translated.text, str)


BAD: dict[str, tuple[dict[str, Any], str, str]] = {  # fields, param, code
    "a number": ({"temperature": "warm"}, "temperature", "invalid_type"),
    "out of range": ({"temperature": "-1"}, "temperature", "decimal_below_min_value"),
    "no tokens": ({"max_completion_tokens": "0"}, "max_completion_tokens",
        "integer_below_min_value"),
    "subtitles": ({"response_format": "srt"}, "response_format", "unsupported_value"),
    "text in a stream": ({"response_format": "text", "stream": "true"}, "response_format",
        "unsupported_value"),
    "times": ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]",
        "unsupported_parameter"),
    "a language": ({"language": "<s>"}, "language", "invalid_value"),
    "a switch": ({"stream": "perhaps"}, "stream", "invalid_type"),
    "twice": ({"prompt": ["a", "b"]}, "prompt", "duplicate_key"),
    "a salt": ({"cache_salt": "a/b"}, "cache_salt", "invalid_value"),
    "no salt": ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    "another model": ({"model": "gpt-7"}, "model", "model_not_found"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_bad_fields(client: httpx.AsyncClient, name: str) -> None:
    more, param, code = BAD[name]
    reply = await post(client, **more)
    error = reply.json()["error"]
    assert reply.status_code in (400, 404), error
    assert (error["param"], error["code"]) == (param, code)


async def test_bad_files(client: httpx.AsyncClient) -> None:
    files = {"file": ("a.wav", b"hello")}
    reply = await client.post("/v1/audio/transcriptions", data=fields(), files=files)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "file", "invalid_audio")
    files = {"file": ("a.wav", b"\0" * (10**6 + 1))}
    reply = await client.post("/v1/audio/transcriptions", data=fields(), files=files)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (413, "request_too_large")
    assert "1000000 bytes" in error["message"]
    reply = await client.post("/v1/audio/transcriptions", data=fields(), files={"x": b"a"})
    assert reply.json()["error"]["param"] == "file"
    reply = await client.post("/v1/audio/transcriptions", json=fields())
    assert reply.status_code == 415


class Upload:
    """A form that comes piece by piece: some fields, then a file of ten megabytes."""

    def __init__(self, model: str) -> None:
        self.sent = 0
        self._model = model

    async def __aiter__(self) -> AsyncIterator[bytes]:
        field = f'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n{self._model}\r\n'
        head = '--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        for piece in (field.encode(), head.encode(), *[bytes(10**5)] * 100, b"\r\n--x--\r\n"):
            self.sent += len(piece)
            yield piece


@pytest.mark.parametrize(
    ("model", "declared", "code", "most"),
    [
        ("tiny", "10000000", "request_too_large", 0),
        ("tiny", None, "request_too_large", 2 * 10**6),
        ("gpt-7", None, "model_not_found", 2 * 10**5),
    ],
)
async def test_a_refused_upload_is_not_read(
    client: httpx.AsyncClient, model: str, declared: str | None, code: str, most: int
) -> None:
    upload = Upload(model)
    headers = {"content-type": "multipart/form-data; boundary=x"}
    headers |= {} if declared is None else {"content-length": declared}
    reply = await client.post("/v1/audio/transcriptions", content=upload, headers=headers)
    assert reply.json()["error"]["code"] == code
    assert upload.sent <= most


async def test_a_form_that_is_none(client: httpx.AsyncClient) -> None:
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x"):
        reply = await client.post(
            "/v1/audio/transcriptions", content=b"hello", headers={"content-type": kind}
        )
        assert reply.status_code == 400, reply.text


async def test_audio_that_is_off(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what decodes it: an upload is not read, and a chat with a clip is refused."""
    monkeypatch.setattr(client.media, "off", "soxr is not installed")  # type: ignore[attr-defined]
    upload = Upload("tiny")
    headers = {"content-type": "multipart/form-data; boundary=x"}
    reply = await client.post("/v1/audio/transcriptions", content=upload, headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "model_not_supported")
    assert "soxr is not installed" in error["message"] and upload.sent == 0
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    reply = await client.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "unsupported_content")
    assert error["param"] == "messages[0].content[0].input_audio.data"
    assert "soxr is not installed" in error["message"]
    body["messages"] = [{"role": "user", "content": "hello"}]
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_salt(client: httpx.AsyncClient) -> None:
    """As in bodies of JSON: pages are shared among requests with the same salt alone."""
    assert (await post(client, cache_salt="ours")).status_code == 200
    engine: Any = client.engine  # type: ignore[attr-defined]
    assert engine.seen[-1].extra_keys == ("salt:ours",)
    assert (await post(client)).status_code == 200 and engine.seen[-1].extra_keys == ()


async def test_unknown_fields_are_named(client: httpx.AsyncClient) -> None:
    reply = await post(client, hotwords="Ada")
    assert reply.headers["x-rayfin-ignored-fields"] == "hotwords"


@pytest.mark.parametrize("task", ["transcriptions", "translations"])
async def test_models_of_text(http: httpx.AsyncClient, task: str) -> None:
    files = {"file": ("speech.wav", FILE)}
    reply = await http.post(f"/v1/audio/{task}", files=files)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "model_not_supported")
    assert "/v1/chat/completions" in error["message"]
