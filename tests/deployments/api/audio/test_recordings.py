"""Recordings longer than a model hears at once: each clip is a request, their texts one."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import numpy as np
import pytest

from audio_models import RATE, AudioModel, text_of, tone, wav
from rayfin.actors.errors import Overloaded, RayfinError, RequestFailed
from rayfin.actors.messages import EngineRequest, TokenDelta
from rayfin.deployments.api.audio.adapter import AT_ONCE
from rayfin.deployments.api.audio.transcript import HeardText, JoinedText
from rayfin.deployments.generation import generation
from rayfin.deployments.media.memory_limit import RecordingRoom
from rayfin.deployments.media.sound import cut_at_quiet
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

OUTPUT = 6
RECORDING = tone(7, 3.3)
AROUND = {
    "voxtral": ("<s>[INST][BEGIN_AUDIO]", "[/INST][TRANSCRIBE]"),
    "glmasr": ("user: ", "Please transcribe this audio into text\nassistant: "),
}


@pytest.fixture(scope="module", params=list(AROUND))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AudioModel:
    return AudioModel(request.param, tmp_path_factory.mktemp(request.param))


def expected(tiny: AudioModel) -> tuple[list[list[int]], str]:
    """The prompt of each clip, and the texts of transformers' answers as one."""
    tokenizer = Tokenizer.load(tiny.folder)
    before, behind = (tokenizer.encode(own, False) for own in AROUND[tiny.family])
    clips = list(cut_at_quiet([RECORDING], RATE, 1.0))
    prompts = [tiny.prompt(before, clip, behind) for clip in clips]
    joined = JoinedText([HeardText("") for _ in clips])
    for place, (ids, media) in enumerate(prompts):
        answer = text_of(tokenizer, tiny.greedy(ids, media, OUTPUT), OUTPUT)
        joined.push(place, answer, last=True)
    return [ids for ids, _ in prompts], joined.text


async def post(client: httpx.AsyncClient, recording: Any = RECORDING, **more: Any) -> Any:
    data = {"model": "tiny", "max_completion_tokens": str(OUTPUT)}
    headers = more.pop("headers", None)
    files = {"file": ("speech.wav", wav(recording, subtype="FLOAT"))}
    if len(recording) > 4 * RATE:
        files = {"file": ("speech.flac", wav(recording, form="FLAC"))}
    return await client.post(
        "/v1/audio/transcriptions", data={**data, **more}, files=files, headers=headers
    )


async def test_a_long_recording(client: httpx.AsyncClient, tiny: AudioModel) -> None:
    prompts, text = expected(tiny)
    assert len(prompts) >= 4
    engine: Any = client.engine  # type: ignore[attr-defined]
    engine.seen.clear()
    reply = await post(client)
    assert reply.status_code == 200, reply.text
    assert reply.json() == {"text": text, "usage": {"type": "duration", "seconds": 4}}
    assert [request.prompt.tolist() for request in engine.seen] == prompts
    verbose = (await post(client, response_format="verbose_json")).json()
    assert (verbose["duration"], verbose["text"]) == (3.3, text)
    whole_seconds = tone(2, 3.0)
    lengths = [len(clip) / RATE for clip in cut_at_quiet([whole_seconds], RATE, 1.0)]
    assert sum(lengths) > 3.0  # as floats
    assert (await post(client, whole_seconds)).json()["usage"]["seconds"] == 3


async def test_a_stream(client: httpx.AsyncClient, tiny: AudioModel) -> None:
    """The texts come in the order of the clips; usage counts all of them."""
    prompts, text = expected(tiny)
    reply = await post(client, stream="true")
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    *deltas, done = map(json.loads, lines[:-1])
    assert "".join(own["delta"] for own in deltas) == text == done["text"]
    assert len(deltas) > 1
    usage = done["usage"]
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert 0 < usage["completion_tokens"] <= OUTPUT * len(prompts)
    assert done["choices"][0]["finish_reason"] in ("length", "stop")


class Holding:
    """An engine that takes requests and answers none of them, until it is let go or fails one.

    Time passes by the seconds that it takes alone.
    """

    def __init__(
        self,
        fails: int | None = None,
        seconds: float | None = None,
        error: type[RayfinError] = Overloaded,
    ) -> None:
        self.taken: list[EngineRequest] = []
        self.arrivals: list[float] = []
        self.open = self.most = 0
        self._fails, self._seconds = fails, seconds  # the number of the one to fail
        self._error = error
        self._now = time.monotonic() + 1000.0  # later than all that has come

    def monotonic(self) -> float:
        return self._now

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        self.taken.append(request)
        self.arrivals.append(request.arrival)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if len(self.taken) - 1 == self._fails:
                raise self._error("no room")
            if self._seconds is None:
                await asyncio.Event().wait()
            else:
                await asyncio.sleep(0)
                self._now += self._seconds
            yield TokenDelta(request.request_id, tokens=[5], finish_reason="stop")
        finally:
            self.open -= 1


@pytest.fixture
def hold(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> Any:
    def hold(**settings: Any) -> Holding:
        holding = Holding(**settings)
        engine: Any = client.engine  # type: ignore[attr-defined]
        monkeypatch.setattr(engine, "stream", holding.stream)
        monkeypatch.setattr(generation, "time", holding)
        return holding

    return hold


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_client_that_leaves(client: httpx.AsyncClient, hold: Any, stream: str) -> None:
    """Every clip's request is aborted, and none begins any more."""
    held = hold()
    asking = asyncio.create_task(post(client, np.tile(tone(3, 1.0), 11), stream=stream))
    while len(held.taken) < AT_ONCE:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert held.open == 0 and held.most == len(held.taken) == AT_ONCE


async def test_a_clip_that_fails(client: httpx.AsyncClient, hold: Any) -> None:
    """Its error is the request's, and the others are aborted."""
    for fails, error, status in ((2, RequestFailed, 500), (0, Overloaded, 429)):
        held = hold(fails=fails, error=error)
        reply = await post(client)
        assert reply.status_code == status and reply.json()["error"]["message"] == "no room"
        assert held.open == 0
        assert client.media.room.num_bytes == 0  # type: ignore[attr-defined]


async def test_a_queue_that_fills_up(
    client: httpx.AsyncClient, hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clip that is refused when others have run tries again, in its own time."""
    monkeypatch.setattr(generation, "RETRY_AFTER_SECONDS", 0.01)
    recording = np.tile(tone(3, 1.0), 11)
    held = hold(seconds=0.01, fails=AT_ONCE + 1)
    reply = await post(client, recording)
    assert reply.status_code == 200, reply.text
    names = [request.request_id for request in held.taken]
    assert len(names) == len(set(names)) + 1
    assert names.count(names[AT_ONCE + 1]) == 2
    # A queue may be shorter than the clips are many: all but the first one wait for it.
    held = hold(seconds=0.01, fails=1)
    reply = await post(client)
    assert reply.status_code == 200, reply.text
    names = [request.request_id for request in held.taken]
    assert names.count(names[1]) == 2
    held = hold(seconds=0.1, fails=AT_ONCE + 1)
    reply = await post(client, recording, headers={"x-request-timeout-ms": "50"})
    assert reply.status_code == 429


async def test_timeouts_count_what_a_clip_waits(client: httpx.AsyncClient, hold: Any) -> None:
    """Of many clips some run at once, in order; the timeout is that of the whole request."""
    held = hold(seconds=0.05)
    recording = np.tile(tone(3, 1.0), 11)
    reply = await post(client, recording, headers={"x-request-timeout-ms": "60000"})
    assert reply.status_code == 200, reply.text
    assert held.most == AT_ONCE < len(held.taken)
    timeouts = [request.timeout for request in held.taken]
    assert timeouts[:AT_ONCE] == [60.0] * AT_ONCE
    assert max(timeouts[AT_ONCE:]) <= 60.0 - 0.05
    names = [request.request_id for request in held.taken]
    assert names == sorted(names, key=lambda name: int(name.split("-")[2]))


async def test_an_idempotency_key(client: httpx.AsyncClient) -> None:
    """A form that is sent again has another boundary, and the same answer."""
    engine: Any = client.engine  # type: ignore[attr-defined]
    engine.seen.clear()
    headers = {"Idempotency-Key": "order 1"}
    first, again = [await post(client, headers=headers) for _ in range(2)]
    count = len(engine.seen)
    assert again.status_code == 200 and again.content == first.content
    assert "idempotent-replayed" in again.headers and "idempotent-replayed" not in first.headers
    assert first.request.headers["content-type"] != again.request.headers["content-type"]
    for other in (
        await post(client, tone(8, 3.3), headers=headers),
        await post(client, language="de", headers=headers),
    ):
        assert other.status_code == 409
    assert len(engine.seen) == count


async def test_times_of_late_clips(client: httpx.AsyncClient, hold: Any) -> None:
    """What a clip waits for its turn is no time of its own: not to its first token, say."""
    held = hold(seconds=0.1)
    reply = await post(client, np.tile(tone(3, 1.0), 11))
    assert reply.status_code == 200, reply.text
    first, late = held.arrivals[0], held.arrivals[AT_ONCE:]
    assert late and min(late) >= first + 0.09
    # If there is no engine meanwhile they wait for one as long as those that have begun.
    assert [own.underway for own in held.taken] == [False] * AT_ONCE + [True] * len(late)


async def test_room_for_recordings(client: httpx.AsyncClient, hold: Any) -> None:
    """One is taken however large it is; another one finds no room until the first has ended."""
    media: Any = client.media  # type: ignore[attr-defined]
    media.room = RecordingRoom(10)
    held = hold()
    asking = asyncio.create_task(post(client))
    while not held.taken:
        await asyncio.sleep(0.01)
    features = media.room.num_bytes
    assert features > 10
    for stream in ("false", "true"):
        reply = await post(client, stream=stream)
        assert reply.status_code == 429, reply.text
        assert "hold" in reply.json()["error"]["message"]
    assert media.room.num_bytes == features
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert media.room.num_bytes == 0
    hold(seconds=0.01)
    for more in ({}, {"stream": "true"}, {"language": "xx-no-such"}, {"temperature": "-1"}):
        await post(client, **more)
        assert media.room.num_bytes == 0


async def test_a_recording_that_is_too_long(client: httpx.AsyncClient) -> None:
    reply = await post(client, np.zeros(13 * RATE, np.float32))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_audio", "file")
    assert "over 12 seconds" in error["message"] and "max_audio_upload" in error["message"]
