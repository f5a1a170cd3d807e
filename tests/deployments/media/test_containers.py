"""Sound in the containers of video."""

import io
from typing import Any

import numpy as np
import pytest

from audio_models import RATE
from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.media.containers import container_of
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.media.sound import Clips

av: Any = pytest.importorskip("av")


def written(form: str, codec: str, seconds: float, rate: int = 48_000, channels: int = 1) -> bytes:
    """A file of a tone of 440 a second."""
    file = io.BytesIO()
    samples = 0.4 * np.sin(2 * np.pi * 440 / rate * np.arange(int(seconds * rate)))
    with av.open(file, "w", format=form) as out:
        track = out.add_stream(codec, rate=rate)
        track.layout = "mono" if channels == 1 else "stereo"
        for start in range(0, len(samples), 960):
            part = np.stack([samples[start : start + 960]] * channels).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=track.layout.name)
            frame.rate, frame.pts = rate, start
            out.mux(track.encode(frame))
        out.mux(track.encode(None))
    return file.getvalue()


def clips(seconds: float = 5.0) -> Clips:
    return Clips(MediaSettings(max_seconds=seconds), RATE)


@pytest.mark.parametrize(
    ("form", "codec", "rate", "channels"),
    [
        ("ipod", "aac", 44_100, 2),
        ("mp4", "aac", 48_000, 1),
        ("mov", "pcm_s16le", 16_000, 1),
        ("webm", "libopus", 48_000, 2),
        ("matroska", "flac", 16_000, 1),
    ],
)
def test_containers(form: str, codec: str, rate: int, channels: int) -> None:
    data = written(form, codec, 2.0, rate, channels)
    assert container_of(data) is not None
    read = clips().decode(data, "file")
    assert abs(len(read) - 2 * RATE) <= 0.1 * RATE and read.dtype == np.float32
    assert np.argmax(np.abs(np.fft.rfft(read[RATE // 2 : 3 * RATE // 2]))) in (439, 440, 441)
    with pytest.raises(InvalidRequest, match="over 1 seconds"):
        clips(1.0).decode(data, "file")


def test_no_length() -> None:
    """A browser that records writes none: it counts as the samples come."""
    file = io.BytesIO(written("webm", "libopus", 2.0))
    live = io.BytesIO()
    with av.open(file) as source, av.open(live, "w", format="webm", options={"live": "1"}) as out:
        track = out.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(source.streams.audio[0]):
            if packet.dts is not None:
                packet.stream = track
                out.mux(packet)
    data = live.getvalue()
    with av.open(io.BytesIO(data)) as source:
        assert source.duration is None
    assert abs(len(clips().decode(data, "file")) - 2 * RATE) <= 0.1 * RATE
    with pytest.raises(InvalidRequest, match="over 1 seconds"):
        clips(1.0).decode(data, "file")


def picture() -> bytes:
    """A video without sound."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        track = out.add_stream("mpeg4", rate=10)
        track.width = track.height = 32
        track.pix_fmt = "yuv420p"
        for _ in range(3):
            image = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            out.mux(track.encode(image))
        out.mux(track.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("name", ["no sound", "cut", "another codec"])
def test_bad_files(name: str) -> None:
    data = {
        "no sound": picture,
        "cut": lambda: written("ipod", "aac", 1.0)[:500],
        "another codec": lambda: written("matroska", "ac3", 1.0),
    }[name]()
    with pytest.raises(InvalidRequest, match="no audio that can be read") as refused:
        clips().decode(data, "file")
    assert (refused.value.param, refused.value.code) == ("file", "invalid_audio")
