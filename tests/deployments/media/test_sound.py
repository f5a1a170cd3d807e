"""Files and arrays of audio become clips of one channel, and what is none is refused."""

import io
import sys
import tracemalloc
import wave
from typing import Any

import numpy as np
import pytest

from audio_models import RATE, tone, wav
from rayfin.actors.errors import InvalidConfig, InvalidRequest
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.media.sound import Clips, audio_off

PATH = "messages[0].content[1].input_audio.data"


def clips(seconds: float = 5.0) -> Clips:
    return Clips(MediaSettings(max_seconds=seconds), RATE)


@pytest.mark.parametrize(
    ("form", "subtype", "error"),
    [("WAV", "PCM_16", 1e-4), ("FLAC", "PCM_16", 1e-4), ("OGG", "VORBIS", 0.2), ("MP3", None, 0.2)],
)
def test_formats(form: str, subtype: str | None, error: float) -> None:
    """Files that lose nothing give the samples; others nearly."""
    clip = 0.5 * np.sin(np.arange(RATE) / 20).astype(np.float32)
    read = clips().decode(wav(clip, form=form, subtype=subtype), PATH)
    assert read.dtype == np.float32 and abs(len(read) - len(clip)) <= 2400
    length = min(len(read), len(clip))
    assert np.abs(read[:length] - clip[:length]).mean() < error


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_rates(rate: int) -> None:
    """A tone stays that tone."""
    t = np.arange(rate) / rate
    read = clips().decode(wav(np.sin(2 * np.pi * 440 * t).astype(np.float32), rate), PATH)
    assert abs(len(read) - RATE) <= 2
    assert np.argmax(np.abs(np.fft.rfft(read[:RATE]))) in (439, 440, 441)


def test_channels_are_mixed() -> None:
    left, right = tone(1), tone(2)
    read = clips().decode(wav(np.stack([left, right], 1), subtype="FLOAT"), PATH)
    assert np.allclose(read, (left + right) / 2, atol=1e-6)


def flac(seconds: float, samples: int) -> bytes:
    """A FLAC whose header says that it has so many samples, of 36 bits."""
    data = bytearray(wav(tone(1, seconds), form="FLAC"))
    data[21] = data[21] & 0xF0 | samples >> 32
    data[22:26] = (samples & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize("samples", [0, 1, RATE, 3 * RATE])
@pytest.mark.parametrize("tags", [b"", b"ID3\4\0\0\0\0\1\5" + bytes(133)])
def test_a_flac_is_read_to_its_end(samples: int, tags: bytes) -> None:
    """Its header may have no length, as of an encoder that writes to a pipe, or too small a one."""
    read = clips().decode(tags + flac(3.0, samples), PATH)
    assert np.abs(read - tone(1, 3.0)).max() < 1e-4


def test_tags_behind_a_flac() -> None:
    data = flac(3.0, 3 * RATE) + b"TAG" + bytes(125)
    assert np.abs(clips().decode(data, PATH) - tone(1, 3.0)).max() < 1e-4
    with pytest.raises(InvalidRequest, match="over 2 seconds"):
        clips(2.0).decode(flac(3.0, RATE), PATH)
    with pytest.raises(InvalidRequest, match="48000 of the 50000 samples"):
        clips().decode(flac(3.0, 50_000), PATH)


def test_blocks_of_a_low_rate_are_short() -> None:
    """A file of kilobytes must not take gigabytes: at the model's rate it has many more samples."""
    silence = np.zeros(300 * 1000, np.float32)
    blocks = list(clips(600.0).recording(wav(silence, 1000, form="FLAC"), PATH))
    assert sum(map(len, blocks)) == 300 * RATE
    assert max(map(len, blocks)) <= 61 * RATE


def mp3(clip: Any, rate: int, mode: str, tagged: bool) -> bytes:
    """An MP3 as it is written, or without its first frame, which says how many there are."""
    data = wav(clip, rate, form="MP3", bitrate_mode=mode, compression_level=0.5)
    if tagged:
        return data
    at = data.find(data[:2], 4)
    return data[at:]


@pytest.mark.parametrize("tags", [b"", b"ID3\4\0\0\0\0\0\5" + bytes(5)])
@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
@pytest.mark.parametrize(("rate", "channels"), [(16000, 1), (44100, 2), (8000, 1), (48000, 1)])
def test_an_mp3_is_read_to_its_end(
    rate: int, channels: int, mode: str, tagged: bool, tags: bytes
) -> None:
    """Also where its rate varies and nothing says how long it is: its start has the most bits."""
    t = np.arange(2 * rate)
    loud = np.random.default_rng(0).normal(0, 0.2, len(t)).astype(np.float32)
    tone_behind = 0.3 * np.sin(2 * np.pi * 440 / rate * t).astype(np.float32)
    clip = np.stack([np.concatenate([loud, tone_behind])] * channels, 1)
    read = clips().decode(tags + mp3(clip, rate, mode, tagged), PATH)
    assert 0 <= len(read) - 4 * RATE < 0.3 * RATE
    behind = read[2 * RATE + RATE // 2 : 3 * RATE + RATE // 2]
    assert np.argmax(np.abs(np.fft.rfft(behind))) == 440
    with pytest.raises(InvalidRequest, match="over 3 seconds"):
        clips(3.0).decode(tags + mp3(clip, rate, mode, tagged), PATH)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\xff\xf1\x50\x80" + bytes(100),  # AAC
        b"\xff\xe8" + bytes(100),
        b"RIFF\0\0\0\0AVI " + bytes(100),
        b"FORM\0\0\0\0AIFF" + bytes(100),
        b"\0\0\0\x20ftypM4A " + bytes(100),
        b"\x1aE\xdf\xa3" + bytes(100),  # WebM
        b"caff" + bytes(100),
        b"RF64\xff\xff\xff\xffWAVE" + bytes(100),
    ],
)
def test_other_formats_never_reach_libsndfile(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    import soundfile

    opened: list[Any] = []
    monkeypatch.setattr(soundfile, "SoundFile", opened.append)
    with pytest.raises(InvalidRequest, match="no audio that can be read"):
        clips().decode(data, PATH)
    assert not opened


def test_arrays() -> None:
    clip = tone(1)
    own = clips()
    for given in (clip, (clip, RATE), clip.tolist(), np.stack([clip, clip]), (clip, float(RATE))):
        assert np.allclose(own.given(given, PATH), clip, atol=1e-6)
    assert len(own.given((clip, np.int64(8000)), PATH)) == 2 * len(clip)
    whole = (clip * 32768).astype(np.int16)
    assert np.allclose(own.given(whole, PATH), clip, atol=1e-4)
    assert len(own.given((clip, 8000), PATH)) == 2 * len(clip)


def header(**changes: int) -> bytes:
    """A WAV file whose header says more than it has."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(changes.get("channels", 1))
        out.setsampwidth(2)
        out.setframerate(changes.get("rate", RATE))
        out.writeframes(b"\0" * changes.get("size", 2000))
    return file.getvalue()


BAD: dict[str, tuple[Any, str]] = {
    "nothing": (b"", "no audio that can be read"),
    "text": (b"hello" * 100, "no audio that can be read"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(200), "no audio that can be read"),
    "AIFF": (wav(tone(1), form="AIFF"), "no audio that can be read"),
    "half a header": (wav(tone(1))[:20], "no audio that can be read"),
    "half a FLAC": (wav(tone(1), form="FLAC")[:60], "is no audio|is empty"),
    "no samples": (wav(tone(1)[:0]), "is empty"),
    "too long": (wav(tone(1, 5.1)), "over 5 seconds"),
    "too long, compressed": (wav(np.zeros(20 * RATE, np.float32), form="FLAC"), "over 5 seconds"),
    "a strange rate": (header(rate=7), "7 samples a second"),
    "many channels": (wav(np.zeros((RATE, 9), np.int16), form="OGG"), "9 channels"),
    "many samples": (wav(np.zeros((4 * 192_000, 2), np.int16), 192_000), "in all channels"),
    "far too loud": (wav(np.full(100, 1e19, np.float32), subtype="FLOAT"), "beyond 1000"),
    "not finite": (wav(np.full(100, np.nan, np.float32), subtype="FLOAT"), "no numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(InvalidRequest, match=message) as refused:
        clips().decode(data, PATH)
    assert (refused.value.param, refused.value.code) == (PATH, "invalid_audio")
    assert PATH in refused.value.message and "\n" not in refused.value.message


@pytest.mark.parametrize(
    "given",
    [
        "a.wav",
        b"RIFF",
        None,
        3,
        [1000, 2000, 3000],
        np.zeros((2, 2, 2)),
        np.array(["x"]),
        [[1.0], [1.0, 2.0]],
    ],
)
def test_bad_arrays(given: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        clips().given(given, PATH)
    assert (refused.value.param, refused.value.code) == (PATH, "invalid_type")


def test_a_long_file_is_refused_before_it_is_decoded() -> None:
    """An hour of silence is a small file."""
    data = wav(np.zeros(3600 * 1000, np.int16), 1000, form="FLAC")
    assert len(data) < 10**6
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="over 5 seconds"):
        clips().decode(data, PATH)
    assert tracemalloc.get_traced_memory()[1] < 2 * 10**6
    tracemalloc.stop()


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("soundfile", "soxr"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, name, None)
            assert audio_off() == f"{name} is not installed (pip install 'rayfin[audio]')"
    assert audio_off() is None
    data = wav(tone(1))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(InvalidConfig, match="pip install"):
        clips().decode(data, PATH)
    assert len(clips().given(tone(1), PATH)) == len(tone(1)), "its rate is the model's already"
