"""A recording is cut where it is quiet, into clips of nearly even length."""

import numpy as np
import pytest

from audio_models import RATE, tone
from rayfin.deployments.media.sound import cut_at_quiet


def test_a_short_one_stays_whole() -> None:
    clip = tone(1, 2.0)
    (own,) = cut_at_quiet([clip], RATE, 2.0)
    assert np.array_equal(own, clip)


@pytest.mark.parametrize("seconds", [2.01, 3.99, 4.0, 7.3, 31.0])
def test_clips_are_all_of_it(seconds: float) -> None:
    recording = tone(1, seconds)
    clips = list(cut_at_quiet([recording], RATE, 2.0))
    assert np.array_equal(np.concatenate(clips), recording)
    lengths = [len(clip) / RATE for clip in clips]
    assert max(lengths) <= 2.0 and min(lengths) >= 0.5
    assert len(clips) <= np.ceil(seconds / 2.0) * 1.4 + 1
    again = list(cut_at_quiet(np.array_split(recording, 7), RATE, 2.0))
    assert [len(clip) for clip in again] == [len(clip) for clip in clips]


def test_a_cut_is_where_it_is_quiet() -> None:
    """In each pause of 0.2 s near the end of a clip."""
    recording = tone(1, 85.0)
    pauses = (29.4, 57.0)
    for pause in pauses:
        recording[int(pause * RATE) : int((pause + 0.2) * RATE)] *= 0.001
    clips = cut_at_quiet([recording], RATE, 30.0)
    cuts = np.cumsum([len(clip) for clip in clips])[:-1] / RATE
    for pause in pauses:
        assert any(pause <= cut <= pause + 0.2 for cut in cuts), cuts


def test_silence_and_few_samples() -> None:
    clips = list(cut_at_quiet([np.zeros(10 * RATE, np.float32)], RATE, 3.0))
    assert sum(map(len, clips)) == 10 * RATE and max(map(len, clips)) <= 3 * RATE
    ones = [np.ones(3, np.float32), np.ones(2, np.float32)]
    assert [len(own) for own in cut_at_quiet(ones, 1, 2.0)] == [2, 2, 1]
    assert list(cut_at_quiet([], RATE, 2.0)) == []
