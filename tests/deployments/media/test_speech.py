"""Which parts of a recording are heard, and what of them is speech."""

import sys

import numpy as np
import pytest

from audio_models import RATE, tone
from rayfin.deployments.media import speech
from rayfin.deployments.media.speech import Recording, find_speech, speech_off

SECONDS = 20.0


def recording(*spoken: tuple[float, float]) -> Recording:
    samples = tone(1, SECONDS)
    places = [(int(first * RATE), int(last * RATE)) for first, last in spoken]
    return Recording(samples, RATE, 5 * RATE, places)


def test_parts() -> None:
    """Long silence is left out, less a little around speech."""
    own = recording((0.2, 1.0), (2.5, 3.0), (5.5, 6.0), (19.0, 19.9))
    seconds = [(first / RATE, last / RATE) for first, last in own.parts]
    assert seconds == [(0.0, 3.4), (5.1, 6.4), (18.6, 20.0)]
    assert own.spoken(0, 3 * RATE) == pytest.approx(1.3)
    assert own.spoken(int(5.75 * RATE), 10 * RATE) == pytest.approx(0.25)
    assert recording().parts == [] and list(recording().windows()) == []


def test_windows() -> None:
    """They are all of each part, in order."""
    own = recording((0.0, 14.0), (17.0, 18.0))
    windows = list(own.windows())
    assert max(len(clip) for _, clip in windows) <= 5 * RATE
    for start, clip in windows:
        assert np.array_equal(clip, own.samples[start : start + len(clip)])
    heard = sum(len(clip) for _, clip in windows) / RATE
    assert heard == pytest.approx(14.4 + 1.8)
    unknown = Recording(own.samples, RATE, 5 * RATE)
    assert unknown.parts == [(0, len(own.samples))] and unknown.spoken(0, RATE) is None


def test_noise_is_no_speech() -> None:
    pytest.importorskip("silero_vad")
    pytest.importorskip("onnxruntime")
    drawn = np.random.default_rng(0)
    noise = drawn.standard_normal(10 * RATE).astype(np.float32)
    hum = np.sin(2 * np.pi * 50 / RATE * np.arange(10 * RATE)).astype(np.float32)
    for loud in (0.0, 0.003, 0.1):
        assert find_speech(loud * noise) == [] == find_speech(loud * hum)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    speech._detector.cache_clear()
    monkeypatch.setitem(sys.modules, "silero_vad", None)
    assert speech_off() == "silero_vad is not installed (pip install 'rayfin[audio]')"
