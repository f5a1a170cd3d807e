"""A model that hears behind the whole server: clips cross Ray's object store."""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from audio_models import AudioModel, tone, wav
from rayfin import LLM, SamplingParams

OUTPUT = 8
FILE = wav(tone(1, 0.9), form="FLAC")
PART = {
    "type": "input_audio",
    "input_audio": {"data": base64.b64encode(FILE).decode(), "format": "flac"},
}
ASKED: Any = [{"role": "user", "content": [PART, {"type": "text", "text": "What is it?"}]}]


@pytest.fixture(scope="module")
def hearing(site: Callable[[str], Any]) -> Any:
    return site("hears")


@pytest.fixture(scope="module")
def client(hearing: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="-", max_retries=0)


@pytest.fixture(scope="module")
def here(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("voxtral")
    AudioModel("voxtral", folder)
    with LLM(**{**settings, "model": str(folder)}) as llm:
        yield llm


def test_chat(client: openai.OpenAI, here: LLM, hearing: Any) -> None:
    """As in one process; a second question about the clip finds its pages."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT)
    (expected,) = here.chat(ASKED, params, use_tqdm=False)
    answers = [
        client.chat.completions.create(
            model="hears", messages=ASKED, temperature=0, max_tokens=OUTPUT
        )
        for _ in range(2)
    ]
    for answer in answers:
        assert answer.choices[0].message.content == expected.outputs[0].text
        assert answer.usage and answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    used = answers[1].usage
    assert used and used.prompt_tokens_details and used.prompt_tokens_details.cached_tokens
    assert hearing.idle().images_encoded == 1


def test_transcription(client: openai.OpenAI) -> None:
    limit: Any = {"max_completion_tokens": OUTPUT}
    asked: Any = {"model": "hears", "file": ("speech.flac", FILE), "extra_body": limit}
    whole = client.audio.transcriptions.create(**asked)
    events = list(client.audio.transcriptions.create(**asked, stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == whole.text
    assert len(events) > 1


def test_a_long_recording(client: openai.OpenAI, hearing: Any) -> None:
    """It is cut by the window of its model, one second: no clip is heard twice."""
    limit: Any = {"max_completion_tokens": OUTPUT}
    file = ("speech.flac", wav(tone(5, 3.5), form="FLAC"))
    asked: Any = {"model": "hears", "file": file, "extra_body": limit}
    before = hearing.idle().images_encoded
    whole = client.audio.transcriptions.create(**asked)
    assert whole.usage and whole.usage.type == "duration" and whole.usage.seconds == 4
    events = list(client.audio.transcriptions.create(**asked, stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == whole.text
    assert 4 <= hearing.idle().images_encoded - before <= 6


def test_a_client_that_leaves_its_recording(client: openai.OpenAI, hearing: Any) -> None:
    """The requests of its clips end in the engine, and those that wait never begin."""
    file = ("speech.flac", wav(tone(6, 16.0), form="FLAC"))
    asked: Any = {"model": "hears", "file": file, "temperature": 1.0}
    before = hearing.idle().finished
    with client.audio.transcriptions.create(
        **asked, stream=True, extra_body={"max_completion_tokens": 300, "seed": 5}
    ) as stream:
        next(iter(stream))
    after = hearing.idle().finished
    assert after.get("abort", 0) > before.get("abort", 0)
    assert sum(after.values()) - sum(before.values()) < 16
    whole = client.audio.transcriptions.create(
        **asked, extra_body={"max_completion_tokens": OUTPUT, "seed": 5}
    )
    assert whole.usage and whole.usage.type == "duration" and whole.usage.seconds == 16


def test_refusals(client: openai.OpenAI) -> None:
    too_long = ("speech.wav", wav(tone(1, 20.5)))
    for file, said in ((too_long, "over 20 seconds"), (("a.mp3", b"hello"), "no audio")):
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            client.audio.transcriptions.create(model="hears", file=file)
        assert refused.value.code == "invalid_audio" and refused.value.param == "file"
