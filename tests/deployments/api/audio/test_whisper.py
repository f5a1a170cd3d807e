"""Whisper over HTTP: its own prompts, the language that it hears, and times."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from audio_models import tone, wav
from inline_client import media_service
from rayfin import LLM
from rayfin.actors.errors import Overloaded
from rayfin.actors.messages import EngineInfo, EngineRequest, Hypothesis, TokenDelta
from rayfin.deployments.api.app import build_api
from rayfin.deployments.api.audio import whisper
from rayfin.deployments.api.audio.segments import sentences
from rayfin.deployments.api.audio.transcript import words_of
from rayfin.deployments.generation.quotas import TokenQuotas
from rayfin.deployments.media import reader
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.media.sound import cut_at_quiet
from rayfin.deployments.text.tokenizer import Tokenizer
from whisper_models import (
    EOS,
    FIRST_TIME,
    IDS,
    ONE_TRY,
    PAGE_SIZE,
    POSITIONS,
    RATE,
    WhisperOracle,
)

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
    data = {"model": "tiny", "max_completion_tokens": str(OUTPUT), **ONE_TRY, **more}
    return await client.post(f"/v1/audio/{task}", data=data, files=files, headers=headers)


def engine(client: httpx.AsyncClient) -> Any:
    return client.engine  # type: ignore[attr-defined]


def answers(
    tiny: WhisperOracle, samples: Any, language: str, task: Any = "transcribe", **asked: Any
) -> tuple[list[list[int]], list[list[int]], list[float]]:
    """Prompts and transformers' tokens of each window of a recording, and where each begins.

    Without times these are clips that are cut where it is quiet.
    """
    ids = tiny.prompts.ask(language, task, asked.get("hint", ""), times=asked["times"])
    if asked["times"]:
        windows = tiny.windows(ids, samples, RATE, OUTPUT)
    else:
        clips = list(cut_at_quiet([samples], RATE, 1.0))
        windows = [(0, clip, tiny.greedy(ids, clip, OUTPUT)) for clip in clips]
    prompts = [tiny.prompt(ids, clip)[0] for _, clip, _ in windows]
    return prompts, [tokens for *_, tokens in windows], [at / RATE for at, *_ in windows]


def transcripts(client: httpx.AsyncClient) -> list[list[int]]:
    """The prompts that the engine has got, without those whose answer is one token."""
    return [own.prompt.tolist() for own in engine(client).seen if own.stopping.max_tokens > 1]


def said(tiny: WhisperOracle, tokens: list[int]) -> str:
    words = [token for token in tokens if token < FIRST_TIME]
    return Tokenizer.load(tiny.folder).decode(words, True)


def seconds(token: int) -> float | None:
    return round((token - FIRST_TIME) * 0.02, 2) if token >= FIRST_TIME else None


def whole(tokens: list[int], begin: float) -> list[int]:
    """The tokens of the whole sentences in the answer for a window of the recording."""
    shown = [token for token in tokens if token not in range(EOS, FIRST_TIME)]
    length = min(1.0, len(RECORDING) / RATE - begin)
    spans = sentences(shown, seconds, length).spans
    return [token for span in spans for token in span.tokens]


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
    window = RECORDING[:RATE]
    language = heard(tiny, window)
    assert answer["language"] == language
    assert first.prompt.tolist() == tiny.prompt(tiny.prompts.detect(), window)[0]
    assert (first.sampling.temperature, first.stopping.max_tokens) == (0.0, 1)
    prompts, tokens, begins = answers(tiny, RECORDING, language, times=True)
    assert transcripts(client) == prompts
    assert {own.extra_keys for own in (first, *rest)} == {("salt:ours",)}
    assert answer["text"] == joined(tiny, [*map(whole, tokens, begins)])
    assert answer["usage"] == {"type": "duration", "seconds": 4}


async def test_translation(client: httpx.AsyncClient, tiny: WhisperOracle) -> None:
    engine(client).seen.clear()
    reply = await post(client, task="translations", response_format="verbose_json")
    prompts, (tokens,), _ = answers(tiny, CLIP, heard(tiny, CLIP), "translate", times=True)
    assert (reply.json()["task"], reply.json()["text"]) == (
        "translate",
        said(tiny, whole(tokens, len(RECORDING) / RATE - 0.8)).lstrip(),
    )
    assert transcripts(client) == prompts
    reply = await post(client, task="translations", language="fr", to_language="English")
    assert reply.status_code == 200, reply.text


async def test_segments(client: httpx.AsyncClient, tiny: WhisperOracle) -> None:
    """Windows begin where the last whole sentence ends; times count in the recording."""
    prompts, tokens, begins = answers(tiny, RECORDING, "de", times=True)
    tokenizer = Tokenizer.load(tiny.folder)
    wanted: list[tuple[Any, ...]] = []
    for begin, answer in zip(begins, tokens, strict=True):
        shown = [token for token in answer if token not in tokenizer.special_token_ids]
        length = min(1.0, len(RECORDING) / RATE - begin)
        for start, end, own in sentences(shown, seconds, length).spans:
            if said(tiny, own).strip():
                times = (round(begin + start, 3), round(begin + end, 3))
                wanted.append((*times, said(tiny, own), own, round(begin * 100)))
    for more in ({}, {"timestamp_granularities[]": "segment"}):
        engine(client).seen.clear()
        reply = await post(client, RECORDING, language="de", response_format="verbose_json", **more)
        assert transcripts(client) == prompts
        found = reply.json()["segments"]
        names = ("start", "end", "text", "tokens", "seek")
        assert [tuple(own[name] for name in names) for own in found] == wanted
    assert len({own["seek"] for own in found}) > 2
    assert [own["id"] for own in found] == list(range(len(found)))
    assert all(own["temperature"] == 0.0 and own["compression_ratio"] > 0 for own in found)
    assert "<|" not in reply.text and "words" not in reply.json()
    ids = tiny.prompts.ask("de", "transcribe", "", times=True)
    for own in found:
        at = begins.index(own["seek"] / 100)
        clip = RECORDING[round(begins[at] * RATE) :][:RATE]
        logprob, quiet = tiny.judged(ids, clip, tokens[at])
        assert own["avg_logprob"] == pytest.approx(logprob, abs=1e-4)
        assert own["no_speech_prob"] == pytest.approx(quiet, abs=1e-5)


async def test_words(client: httpx.AsyncClient, tiny: WhisperOracle) -> None:
    """Their times are those of transformers' steps on its own cross attention."""
    asked: dict[str, Any] = {"language": "de", "response_format": "verbose_json"}
    reply = await post(client, RECORDING, **asked, **{"timestamp_granularities[]": "word"})
    assert reply.status_code == 200, reply.text
    body, tokenizer, wanted = reply.json(), Tokenizer.load(tiny.folder), []
    _, tokens, begins = answers(tiny, RECORDING, "de", times=True)
    ids = tiny.prompts.ask("de", "transcribe", "", times=False)
    for begin, answer in zip(begins, tokens, strict=True):
        clip = RECORDING[round(begin * RATE) :][:RATE]
        text = [token for token in whole(answer, begin) if token < FIRST_TIME]
        if text:
            wanted += words_of(text, tiny.times(ids, text, clip), begin, tokenizer)
    assert body["words"] == [own.model_dump() for own in wanted] and len(wanted) > 2
    assert "segments" not in body
    both = {"timestamp_granularities[]": ["word", "segment"]}
    reply = await post(client, RECORDING, **asked, **both)
    assert reply.json()["words"] == body["words"] and reply.json()["segments"]


async def test_beams(
    client: httpx.AsyncClient, tiny: WhisperOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of several transcripts, of which each keeps to the rules."""
    ids, found = tiny.prompts.ask("de", "transcribe", "", times=True), list[Hypothesis]()
    asked: dict[str, Any] = {"language": "de", "response_format": "srt"}
    inner = engine(client).stream

    async def stream(request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        async for delta in inner(request):
            found.extend(delta.hypotheses[:1])
            yield delta

    monkeypatch.setattr(engine(client), "stream", stream)
    differ = 0
    for seed in range(4):
        clip = tone(seed, 0.9)
        engine(client).seen.clear()
        reply = await post(client, clip, **asked, beam_size="3")
        assert reply.status_code == 200, reply.text
        first = engine(client).seen[0]
        assert first.beams is not None and first.beams.width == 3
        best = found[0]
        found.clear()
        text = [token for token in best.tokens if token != EOS]
        mean = best.score * len(best.tokens) / (len(text) + 1)
        assert mean == pytest.approx(tiny.judged(ids, clip, best.tokens)[0], abs=1e-4)
        differ += best.tokens != tiny.greedy(ids, clip, OUTPUT)
    assert differ
    for width in ("5", "0"):  # a step has four rows
        reply = await post(client, **asked, beam_size=width)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "beam_size"), reply.text
    info = await engine(client).info()
    pages = -(-info.max_model_len // info.page_size)  # of one transcript

    async def full() -> EngineInfo:
        return replace(info, num_pages=pages)

    monkeypatch.setattr(engine(client), "info", full)
    form: dict[str, Any] = {"data": {"model": "tiny", **asked}, "files": {"file": wav(CLIP)}}
    assert (await client.post("/v1/audio/transcriptions", **form)).status_code == 200


async def test_tries(client: httpx.AsyncClient, tiny: WhisperOracle) -> None:
    """A text that is unlikely, or repeats itself, is tried again; the likeliest try is taken."""
    asked = {"language": "de", "response_format": "verbose_json"}
    for limit in ({"log_prob_threshold": "-0.0001"}, {"compression_ratio_threshold": "0.01"}):
        engine(client).seen.clear()
        reply = await post(client, **asked, **limit, no_speech_threshold="1")
        tried = [own for own in engine(client).seen if own.stopping.max_tokens > 1]
        heats = [round(own.sampling.temperature, 1) for own in tried]
        assert list(dict.fromkeys(heats)) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        again = await post(client, **asked, **limit, no_speech_threshold="1")
        assert again.json() == reply.json(), "a recording has one text"
    engine(client).seen.clear()
    await post(client, **asked, log_prob_threshold="-0.0001", temperature="0.7")
    heats = [own.sampling.temperature for own in engine(client).seen if own.stopping.max_tokens > 1]
    assert set(heats) == {0.7}, "what a client asks for is one try"


async def test_silence_has_no_text(client: httpx.AsyncClient) -> None:
    """An unlikely text of a clip that seems to have no speech."""
    limits = {"log_prob_threshold": "-0.0001", "no_speech_threshold": "0"}
    for form in ("json", "verbose_json"):
        reply = await post(client, language="de", response_format=form, **limits)
        assert reply.json()["text"] == ""
    assert reply.json()["segments"] == []


async def test_the_text_before_is_a_hint(client: httpx.AsyncClient, tiny: WhisperOracle) -> None:
    """For a model whose hints are kept apart by a token."""
    engine(client).seen.clear()
    asked = {"language": "de", "response_format": "verbose_json", "prompt": "Ada"}
    reply = await post(client, RECORDING, condition_on_previous_text="true", **asked)
    before, prompts = list[int](), transcripts(client)
    begins = sorted({own["seek"] for own in reply.json()["segments"]})
    assert len(begins) > 1
    for own in begins:
        ids = tiny.prompts.ask("de", "transcribe", "Ada", times=True, before=before)
        clip = RECORDING[own * RATE // 100 :][:RATE]
        assert tiny.prompt(ids, clip)[0] in prompts
        for one in reply.json()["segments"]:
            before += one["tokens"] if one["seek"] == own else []


async def test_silence_is_skipped(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows begin a little before speech; without any the engine is not asked."""
    speech = [(0.3, 0.8), (5.0, 5.4), (5.9, 6.5)]
    monkeypatch.setattr(whisper, "speech_off", lambda: None)
    monkeypatch.setattr(
        reader, "find_speech", lambda _: [(int(a * RATE), int(b * RATE)) for a, b in speech]
    )
    asked = {"language": "de", "vad_filter": "true"}
    recording = tone(7, 8.0)
    reply = await post(client, recording, response_format="verbose_json", **asked)
    seeks = [own["seek"] / 100 for own in reply.json()["segments"]]
    assert seeks[0] == 0.0 and 4.6 in seeks and reply.json()["duration"] == 8.0
    assert not any(1.2 < own < 4.6 or own > 6.9 for own in seeks)
    speech.clear()
    engine(client).seen.clear()
    timed = {"response_format": "verbose_json"}
    for more in ({}, timed, {**timed, "beam_size": "2"}, {"stream": "true"}):
        reply = await post(client, recording, **asked, **more)
        assert reply.status_code == 200, reply.text
        assert '"text":""' in reply.text
    assert not engine(client).seen
    monkeypatch.setattr(whisper, "speech_off", lambda: "silero_vad is not installed")
    reply = await post(client, **asked)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "vad_filter"


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
        reply = await client.post("/v1/audio/transcriptions", files=files, data=ONE_TRY | more)
        assert reply.status_code == 200, reply.text
        request = next(own for own in engine(client).seen if own.stopping.max_tokens > 1)
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
    "times of letters": (
        "transcriptions",
        {"response_format": "verbose_json", "timestamp_granularities[]": ["segment", "letter"]},
        "timestamp_granularities[]",
        "unsupported_value",
    ),
    "a hint in a stream": (
        "transcriptions",
        {"condition_on_previous_text": "true", "stream": "true"},
        "condition_on_previous_text",
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


async def test_windows_follow_one_another(
    client: httpx.AsyncClient, scripted: Any, tiny: WhisperOracle
) -> None:
    """Each begins where the last whole sentence of the one before ends."""
    said, at = IDS["H"], [FIRST_TIME + 5 * tenth for tenth in range(11)]
    windows = {  # begins, and what is heard there
        0.0: [at[0], said, at[5], at[5]],
        0.5: [at[0], said, at[4], at[4], said, said],  # the last one is cut off
        0.9: [at[1], said, at[6]],  # there is no more in it
        1.9: [],
        2.9: [at[0], said, said],  # it does not end, and nothing comes behind it
    }
    held = scripted(*windows.values())
    reply = await post(client, RECORDING, language="de", response_format="srt")
    ids = tiny.prompts.ask("de", "transcribe", "", times=True)
    clips = [RECORDING[round(begin * RATE) :][:RATE] for begin in windows]
    assert [own.prompt.tolist() for own in held.taken] == [tiny.prompt(ids, c)[0] for c in clips]
    spans = [line for line in reply.text.splitlines() if " --> " in line]
    times = [
        f"00:00:0{begin} --> 00:00:0{end}"
        for begin, end in (
            ("0,000", "0,500"),
            ("0,500", "0,900"),
            ("1,000", "1,500"),
            ("2,900", "3,300"),
        )
    ]
    assert spans == times


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
    asked["extra_body"] = {"max_completion_tokens": OUTPUT, **ONE_TRY}
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
            assert reply.json()["language"] == "en" and seen[0].stopping.max_tokens > 1
            seen[1:] = []
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
