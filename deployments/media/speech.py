"""A recording of speech: where somebody speaks in it, and windows that begin anywhere.

Silero's detector finds the speech: a model of two megabytes, which hears an hour in seconds. Its
package and onnxruntime are part of the extra ``rayfin[audio]``.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rayfin.actors.media.audio_processor import Samples
from rayfin.deployments.media.sound import cut_at_quiet

RATE = 16_000  # samples a second that the detector hears
SILENCE = 2.0  # seconds without speech that are skipped
AROUND = 0.4  # seconds that are heard before and behind speech


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole recording [N]; places in it are counted in samples."""

    samples: Samples
    rate: int  # samples a second
    window: int  # samples that its model hears at once
    speech: list[tuple[int, int]] | None = None  # where somebody speaks; None: not looked for

    @property
    def seconds(self) -> float:
        return round(len(self.samples) / self.rate, 3)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Returns what is to be heard: all but long silence."""
        if self.speech is None:
            return [(0, len(self.samples))]
        merged: list[tuple[int, int]] = []
        for first, last in self.speech:
            if merged and first - merged[-1][1] < SILENCE * self.rate:
                first = merged.pop()[0]
            merged.append((first, last))
        around = int(AROUND * self.rate)
        end = len(self.samples)
        return [(max(0, first - around), min(end, last + around)) for first, last in merged]

    def windows(self) -> Iterator[tuple[int, Samples]]:
        """Windows of all parts, cut where it is quiet, and where each one begins."""
        for first, last in self.parts:
            whole = self.samples[first:last]
            for clip in cut_at_quiet([whole], self.rate, self.window / self.rate):
                yield first, clip
                first += len(clip)

    def spoken(self, first: int, last: int) -> float | None:
        """Seconds of speech between two places; None: not known."""
        if self.speech is None:
            return None
        parts = ((max(first, begin), min(last, end)) for begin, end in self.speech)
        return sum(max(0, end - begin) for begin, end in parts) / self.rate


def speech_off() -> str | None:
    """Why this process finds no speech; None: it does."""
    try:
        _detector()
    except ImportError as error:
        return f"{error.name} is not installed (pip install 'rayfin[audio]')"
    return None


def find_speech(samples: Samples) -> list[tuple[int, int]]:
    """First and past-the-last sample of each stretch of speech in ``samples`` [N] of ``RATE``.

    It takes a second of a core for some minutes. Threads may call it at once.

    Raises:
        ImportError: see ``speech_off``.
    """
    package, model = _detector()
    stretches = package.get_speech_timestamps_sequence(samples, model, speech_pad_ms=0)
    return [(int(stretch["start"]), int(stretch["end"])) for stretch in stretches]


@lru_cache(maxsize=1)
def _detector() -> tuple[Any, Any]:
    import torch

    threads = torch.get_num_threads()
    try:
        package = importlib.import_module("silero_vad")
        return package, package.load_silero_vad(sequence=True)
    finally:
        torch.set_num_threads(threads)  # it sets them to one, for the whole process
