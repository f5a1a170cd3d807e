"""Whisper behind the whole server: clips cross Ray's object store."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from ray import serve

from audio_models import tone, wav
from rayfin.actors.config import EngineArgs
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.deployments.text.tokenizer import Tokenizer
from whisper_models import FIRST_TIME, ONE_TRY, WhisperOracle

OUTPUT = 8
CLIP = tone(1, 0.9)
FILE = ("speech.wav", wav(CLIP, subtype="FLOAT"))
LIMIT: Any = {"max_completion_tokens": OUTPUT, **ONE_TRY}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> WhisperOracle:
    return WhisperOracle(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def hearing(
    oracle: WhisperOracle, settings: dict[str, Any], served: str, deploy: Callable[..., Any]
) -> Iterator[Any]:
    args = EngineArgs(**{**settings, "model": str(oracle.folder)})
    yield deploy(bind_app(ServerArgs(served_model_name=["tiny"]), args), "whisper", served, "/hear")
    serve.delete("whisper")


@pytest.fixture(scope="module")
def client(hearing: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="-", max_retries=0)


def expected(oracle: WhisperOracle, language: str, task: Any = "transcribe") -> str:
    """The text of transformers' answer."""
    ids = oracle.prompts.ask(language, task, "", times=False)
    words = [token for token in oracle.greedy(ids, CLIP, OUTPUT) if token < FIRST_TIME]
    return Tokenizer.load(Path(oracle.folder)).decode(words, True).lstrip()


def test_a_language_that_is_heard(
    client: openai.OpenAI, hearing: Any, oracle: WhisperOracle
) -> None:
    """The transcript is in it; the clip is encoded once for both requests, and for the next."""
    language = oracle.prompts.language(oracle.language(CLIP))
    assert language is not None
    answer = client.audio.transcriptions.create(model="tiny", file=FILE, extra_body=LIMIT)
    assert answer.text == expected(oracle, language)
    events = list(
        client.audio.transcriptions.create(model="tiny", file=FILE, stream=True, extra_body=LIMIT)
    )
    assert events[-1].type == "transcript.text.done" and events[-1].text == answer.text
    assert hearing.idle().images_encoded == 1
    spoken = client.audio.translations.create(model="tiny", file=FILE, extra_body=LIMIT)
    assert isinstance(spoken, openai.types.audio.Translation)
    assert spoken.text == expected(oracle, language, "translate")


def test_times(client: openai.OpenAI, oracle: WhisperOracle) -> None:
    """Of a recording of two windows, by OpenAI's client."""
    file = ("speech.flac", wav(tone(5, 3.0), form="FLAC"))
    asked: Any = {"model": "tiny", "file": file, "extra_body": LIMIT}
    verbose = client.audio.transcriptions.create(
        **asked, response_format="verbose_json", timestamp_granularities=["segment", "word"]
    )
    assert verbose.language in oracle.prompts.tokens.languages and verbose.duration == 3.0
    assert verbose.segments and {own.seek > 0 for own in verbose.segments} == {False, True}
    times = [time for own in verbose.segments for time in (own.start, own.end)]
    assert times == sorted(times) and times[-1] <= 3.0
    assert verbose.words and all(own.start <= own.end <= 3.0 for own in verbose.words)
    text = client.audio.transcriptions.create(**asked, response_format="srt")
    assert str(text).count(" --> ") == len(verbose.segments)


def test_a_chat(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/audio/transcriptions") as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    assert refused.value.code == "model_not_supported"
