"""Whisper over HTTP: its own prompts, the language that it hears, and times."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from audio_models import tone, wav
from inline_client import media_service
from rayfin import LLM
from rayfin.actors.errors import Overloaded
from rayfin.actors.messages import EngineRequest, TokenDelta
from rayfin.deployments.api.app import build_api
from rayfin.deployments.api.audio.segments import spans
from rayfin.deployments.generation.quotas import TokenQuotas
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.media.sound import cut_at_quiet
from rayfin.deployments.text.tokenizer import Tokenizer
from whisper_models import FIRST_TIME, IDS, PAGE_SIZE, POSITIONS, RATE, WhisperOracle

pytestmark = pytest.mark.anyio

OUTPUT = 12
CLIP = tone(1, 0.8)
RECORDING = tone(7, 3.3)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "kv_cache_memory": 10**6,
    "max_decoding_batch": 4,
    "page_size": PAGE_SIZE,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> WhisperOracle:
    return WhisperOracle(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(tiny: WhisperOracle) -> Iterator[LLM]:
    with LLM(str(tiny.folder), **SETTINGS) as llm:
        yield llm


async def post(
    client: httpx.AsyncClient, samples: Any = CLIP, task: str = "transcriptions", **more: Any
) -> Any:
    files = {"file": ("speech.wav", wav(samples, subtype="FLOAT"))}
    headers = more.pop("headers", None)
    data = {"model": "tiny", "max_completion_tokens": str(OUTPUT), **more}
    return await client.post(f"/v1/audio/{task}", data=data, files=files, headers=headers)


def engine(client: httpx.AsyncClient) -> Any:
    return client.engine  # type: ignore[attr-defined]


def answers(
    tiny: WhisperOracle, samples: Any, language: str, task: Any = "transcribe", **asked: Any
) -> tuple[list[list[int]], list[list[int]], list[float]]:
    """Prompts and transformers' tokens of each clip of a recording, and the clips' seconds."""
    clips = list(cut_at_quiet([samples], RATE, 1.0))
    ids = tiny.prompts.ask(language, task, asked.get("hint", ""), times=asked["times"])
    prompts = [tiny.prompt(ids, clip)[0] for clip in clips]
    tokens = [tiny.greedy(ids, clip, OUTPUT) for clip in clips]
    return prompts, tokens, [len(clip) / RATE for clip in clips]


def said(tiny: WhisperOracle, tokens: list[int]) -> str:
    words = [token for token in tokens if token < FIRST_TIME]
    return Tokenizer.load(tiny.folder).decode(words, True)


def joined(tiny: WhisperOracle, answers: list[list[int]]) -> str:
    whole = ""
    for tokens in answers:
        text = said(tiny, tokens).lstrip()
        whole += " " + text if whole and text and not whole[-1].isspace() else text
    return whole


def heard(tiny: WhisperOracle, clip: Any) -> str:
    code = tiny.prompts.language(tiny.language(clip))
    assert code is not None
    return code


async def test_a_transcript(client: httpx.AsyncClient, tiny: WhisperOracle) -> None:
    """One request to the engine where the form names the language, with the hint in front."""
    for more in ({}, {"prompt": "Ada"}):
        engine(client).seen.clear()
        reply = await post(client, language="German", **more)
        assert reply.status_code == 200, reply.text
        hint = more.get("prompt", "")
        prompts, (tokens,), _ = answers(tiny, CLIP, "de", times=False, hint=hint)
        assert [own.prompt.tolist() for own in engine(client).seen] == prompts
        usage = {"type": "duration", "seconds": 1}
        assert reply.json() == {"text": said(tiny, tokens).lstrip(), "usage": usage}


async def test_the_language(client: httpx.AsyncClient, tiny: WhisperOracle) -> None:
    """The first clip tells it; all clips are asked in it, and its request is the client's too."""
    engine(client).seen.clear()
    reply = await post(client, RECORDING, response_format="verbose_json", cache_salt="ours")
    answer = reply.json()
    first, *rest = engine(client).seen
    clips = list(cut_at_quiet([RECORDING], RATE, 1.0))
    language = heard(tiny, clips[0])
    assert answer["language"] == language
    assert first.prompt.tolist() == tiny.prompt(tiny.prompts.detect(), clips[0])[0]
    assert (first.sampling.temperature, first.stopping.max_tokens) == (0.0, 1)
    prompts, tokens, _ = answers(tiny, RECORDING, language, times=True)
    assert [own.prompt.tolist() for own in rest] == prompts
    assert {own.extra_keys for own in (first, *rest)} == {("salt:ours",)}
    assert answer["text"] == joined(tiny, tokens)
    assert answer["usage"] == {"type": "duration", "seconds": 4}


async def test_translation(client: httpx.AsyncClient, tiny: WhisperOracle) -> None:
    engine(client).seen.clear()
    reply = await post(client, task="translations", response_format="verbose_json")
    prompts, (tokens,), _ = answers(tiny, CLIP, heard(tiny, CLIP), "translate", times=True)
    assert (reply.json()["task"], reply.json()["text"]) == (
        "translate",
        said(tiny, tokens).lstrip(),
    )
    assert [own.prompt.tolist() for own in engine(client).seen[1:]] == prompts
    reply = await post(client, task="translations", language="fr", to_language="English")
    assert reply.status_code == 200, reply.text


async def test_segments(client: httpx.AsyncClient, tiny: WhisperOracle) -> None:
    """Each clip's times count from where it begins in the recording."""
    _, tokens, lengths = answers(tiny, RECORDING, "de", times=True)
    tokenizer = Tokenizer.load(tiny.folder)
    wanted: list[tuple[Any, ...]] = []
    for place, (answer, length) in enumerate(zip(tokens, lengths, strict=True)):
        begin = sum(lengths[:place])
        shown = [token for token in answer if token not in tokenizer.special_token_ids]
        for start, end, own in spans(shown, tiny.prompts.seconds, length):
            if said(tiny, own).strip():
                times = (round(begin + start, 3), round(begin + end, 3))
                wanted.append((*times, said(tiny, own), own, round(begin * 100)))
    for more in ({}, {"timestamp_granularities[]": "segment"}):
        reply = await post(client, RECORDING, language="de", response_format="verbose_json", **more)
        found = reply.json()["segments"]
        names = ("start", "end", "text", "tokens", "seek")
        assert [tuple(own[name] for name in names) for own in found] == wanted
    assert len({own["seek"] for own in found}) > 2
    assert [own["id"] for own in found] == list(range(len(found)))
    assert all(own["temperature"] == 0.0 and own["compression_ratio"] > 0 for own in found)
    assert all(own["avg_logprob"] is own["no_speech_prob"] is None for own in found)
    assert "<|" not in reply.text


async def test_subtitles(client: httpx.AsyncClient) -> None:
    whole = await post(client, RECORDING, language="de", response_format="verbose_json")
    found = whole.json()["segments"]
    for form, point in (("srt", ","), ("vtt", ".")):
        reply = await post(client, RECORDING, language="de", response_format=form)
        assert reply.headers["content-type"].startswith("text/plain")
        spans = [line for line in reply.text.splitlines() if " --> " in line]
        assert len(spans) == len(found)
        assert all(line[8] == line[25] == point and len(line) == 29 for line in spans)
        assert reply.text.startswith("WEBVTT\n\n00:00:0" if form == "vtt" else "1\n00:00:0")
        assert float(spans[-1][-6:].replace(",", ".")) == pytest.approx(found[-1]["end"])


async def test_no_limit_of_tokens(client: httpx.AsyncClient) -> None:
    """An answer may fill the decoder's positions; one that does is cut, and is none the worse."""
    for form in ("json", "verbose_json"):
        engine(client).seen.clear()
        more = {"prompt": "words " * 50, "response_format": form}
        files = {"file": ("speech.wav", wav(CLIP, subtype="FLOAT"))}
        reply = await client.post("/v1/audio/transcriptions", files=files, data=more)
        assert reply.status_code == 200, reply.text
        request = engine(client).seen[-1]
        begun = len(request.prompt) - len(client.media.processor.process(CLIP).ids)  # type: ignore[attr-defined]
        assert request.stopping.max_tokens == POSITIONS - begun


async def test_a_stream(client: httpx.AsyncClient, tiny: WhisperOracle) -> None:
    _, tokens, _ = answers(tiny, RECORDING, "de", times=False)
    reply = await post(client, RECORDING, language="de", stream="true")
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    *deltas, done = map(json.loads, lines[:-1])
    assert "".join(own["delta"] for own in deltas) == done["text"] == joined(tiny, tokens)


OTHERS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "a"},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "responses": {"input": "a"},
    "messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "embeddings": {"input": "a"},
}


@pytest.mark.parametrize("route", OTHERS)
async def test_other_routes(client: httpx.AsyncClient, route: str) -> None:
    """They answer as for models that pool, and name those that there are."""
    engine(client).seen.clear()
    reply = await client.post(f"/v1/{route}", json={"model": "tiny", **OTHERS[route]})
    assert reply.status_code == 404 and not engine(client).seen
    assert "/v1/audio/transcriptions, /v1/audio/translations" in reply.text
    if route != "messages":  # whose errors are Anthropic's
        assert reply.json()["error"]["code"] == "model_not_supported"


async def test_routes_of_every_model(client: httpx.AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()
    assert [own["id"] for own in models["data"]] == ["tiny"]
    tokens = await client.post("/tokenize", json={"model": "tiny", "prompt": "Hi"})
    assert tokens.json()["tokens"] == [IDS["H"], IDS["i"]]


BAD: dict[str, tuple[str, dict[str, Any], str, str]] = {  # task, fields, param, code
    "no such language": ("transcriptions", {"language": "xx"}, "language", "invalid_value"),
    "a control token": ("transcriptions", {"prompt": "a <|0.00|>"}, "prompt", "invalid_value"),
    "into German": ("translations", {"to_language": "de"}, "to_language", "invalid_value"),
    "times of words": (
        "transcriptions",
        {"response_format": "verbose_json", "timestamp_granularities[]": ["segment", "word"]},
        "timestamp_granularities[]",
        "unsupported_value",
    ),
    "times without a place": (
        "transcriptions",
        {"timestamp_granularities": "segment"},
        "timestamp_granularities",
        "unsupported_value",
    ),
    "subtitles in a stream": (
        "transcriptions",
        {"response_format": "srt", "stream": "true"},
        "response_format",
        "unsupported_value",
    ),
    "log probabilities": (
        "transcriptions",
        {"include[]": "logprobs"},
        "include[]",
        "unsupported_parameter",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_fields(client: httpx.AsyncClient, name: str) -> None:
    task, more, param, code = BAD[name]
    engine(client).seen.clear()
    reply = await post(client, task=task, **more)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code)
    assert not engine(client).seen


class Scripted:
    """An engine that answers as it is set up: tokens of languages, then of transcripts."""

    def __init__(self, *answers: list[int], error: Exception | None = None) -> None:
        self.taken: list[EngineRequest] = []
        self.open = 0
        self._answers, self._error = answers, error

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        self.taken.append(request)
        self.open += 1
        try:
            if self._error is not None:
                raise self._error
            if len(self.taken) > len(self._answers):
                await asyncio.Event().wait()
            await asyncio.sleep(0.05)
            for token in self._answers[len(self.taken) - 1]:
                yield TokenDelta(request.request_id, tokens=[token])
            yield TokenDelta(request.request_id, tokens=[], finish_reason="length")
        finally:
            self.open -= 1


@pytest.fixture
def scripted(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> Any:
    def scripted(*answers: list[int], **settings: Any) -> Scripted:
        made = Scripted(*answers, **settings)
        monkeypatch.setattr(engine(client), "stream", made.stream)
        return made

    return scripted


GERMAN = IDS["<|de|>"]
ANSWER = [IDS["H"], FIRST_TIME + 4, IDS["i"]]


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_times_are_no_text(client: httpx.AsyncClient, scripted: Any, stream: str) -> None:
    """A model may write one though its prompt wants none."""
    scripted([GERMAN], ANSWER)
    reply = await post(client, stream=stream)
    assert "Hi" in reply.text.replace('"delta":"H"', "") and "0.08" not in reply.text


async def test_the_timeout_of_both(client: httpx.AsyncClient, scripted: Any) -> None:
    """What the language takes is gone for the transcript."""
    held = scripted([GERMAN], ANSWER)
    reply = await post(client, headers={"x-request-timeout-ms": "60000"})
    assert reply.status_code == 200, reply.text
    first, second = (own.timeout for own in held.taken)
    assert first == 60.0 and second <= 59.95


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_client_that_leaves(client: httpx.AsyncClient, scripted: Any, stream: str) -> None:
    held = scripted()
    asking = asyncio.create_task(post(client, stream=stream))
    while not held.open:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert held.open == 0 and len(held.taken) == 1
    assert client.media.room.num_bytes == 0  # type: ignore[attr-defined]


async def test_failures(client: httpx.AsyncClient, scripted: Any) -> None:
    scripted(error=Overloaded("no room"))
    for stream in ("false", "true"):
        assert (await post(client, stream=stream)).status_code == 429
    scripted([IDS["a"]])
    reply = await post(client)
    assert reply.status_code == 500 and "no language" in reply.json()["error"]["message"]


async def test_a_quota_counts_the_clip_once(
    client: httpx.AsyncClient, scripted: Any, tiny: WhisperOracle
) -> None:
    service: Any = client.service  # type: ignore[attr-defined]
    service.quotas = TokenQuotas(10_000.0, clock=lambda: 0.0)
    scripted([GERMAN], ANSWER)
    reply = await post(client)
    (prompt,), _, _ = answers(tiny, CLIP, "de", times=False)
    left = service.quotas.admit("", 0)["x-ratelimit-remaining-tokens"]
    assert int(left) == 10_000 - len(prompt) - len(ANSWER)
    assert reply.headers["x-ratelimit-remaining-tokens"] == str(10_000 - len(prompt))


async def test_openais_client(client: httpx.AsyncClient) -> None:
    theirs = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=client)
    asked: Any = {"model": "tiny", "file": ("speech.wav", wav(CLIP))}
    asked["extra_body"] = {"max_completion_tokens": OUTPUT}
    verbose = await theirs.audio.transcriptions.create(
        **asked, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert verbose.segments is not None and all(own.end <= 0.8 for own in verbose.segments)
    text = await theirs.audio.translations.create(**asked, response_format="srt")
    assert isinstance(text, str)


async def test_english_only(tmp_path: Path) -> None:
    """Its prompts name no language, none is asked for, and it does not translate."""
    own = WhisperOracle(tmp_path, seed=1, english=True)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        service = media_service(llm, own, MediaSettings(urls=False))
        transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            seen = service.client.seen  # type: ignore[attr-defined]
            reply = await post(client, response_format="verbose_json")
            assert reply.status_code == 200, reply.text
            assert reply.json()["language"] == "en" and len(seen) == 1
            ids = own.prompts.ask(None, "transcribe", "", times=True)
            assert seen[0].prompt.tolist() == own.prompt(ids, CLIP)[0]
            for task, more, param in (
                ("translations", {}, "model"),
                ("transcriptions", {"language": "de"}, "language"),
            ):
                reply = await post(client, task=task, **more)
                error = reply.json()["error"]
                assert (reply.status_code, error["param"]) == (400, param)
                assert error["code"] == "invalid_value" and len(seen) == 1
