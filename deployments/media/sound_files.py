"""Files of audio by blocks of samples: which formats are read, and how many samples there are.

libsndfile sees a file only if its first bytes are those of a format that is served. It stops where
a header says that the samples end: a FLAC or MP3 is read to its real end instead, as its header may
say less, or nothing at all where an encoder has written to a pipe.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfin.deployments.media.mp3_tag import endless_mp3

FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")  # as soundfile calls them
BLOCK = 2**20  # numbers that are decoded at once, at most ...
LONGEST_BLOCK = 60  # ... and seconds: of a low rate a second becomes many more numbers
UNKNOWN = 2**62  # libsndfile counts so many samples or more where a header has no number

ID3 = b"ID3"  # tags before an MP3, and before some FLACs
FLAC = b"fLaC"
FLAC_SAMPLES = 21  # where the 36 bits of their number begin, in the lower half of a byte

Block = npt.NDArray[np.float32]
"""Samples [N, channels]."""


@dataclass(frozen=True, slots=True)
class SoundFile:
    """A file that is open."""

    rate: int  # samples a second
    channels: int
    samples: int | None  # of a channel, as the header has them; None: it does not say
    blocks: Iterator[Block]
    to_its_end: bool = False  # whatever the header says
    least: int = 0  # samples; with fewer the file is cut short


@contextmanager
def open_sound(soundfile: Any, data: bytes) -> Iterator[SoundFile]:
    """Opens a file.

    Args:
        soundfile: the package.

    Raises:
        Exception: of libsndfile's, or ValueError: it is no audio, or of another format. Also while
            blocks are read.
    """
    if not is_served(data):
        raise ValueError("another format")
    start = _behind_tags(data)
    if data.startswith(FLAC, start):
        with _open_flac(soundfile, data[start:]) as file:
            yield file
        return
    mp3 = endless_mp3(data, start)
    with soundfile.SoundFile(io.BytesIO(data if mp3 is None else mp3.data)) as sound:
        if sound.format not in FORMATS:
            raise ValueError(sound.format)
        samples = None if sound.frames >= UNKNOWN else sound.frames
        if mp3 is not None:
            samples = mp3.samples
        yield SoundFile(sound.samplerate, sound.channels, samples, _blocks(sound), mp3 is not None)


def is_served(data: bytes) -> bool:
    """Whether a file begins as one of a format that is served."""
    if data.startswith((FLAC, b"OggS", ID3)):
        return True
    if data.startswith(b"RIFF"):
        return data[8:12] == b"WAVE"
    # An MPEG frame: 11 bits that are set, then a version and a layer, each with one that is none.
    return len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and _is_mpeg(data[1])


def _is_mpeg(second: int) -> bool:
    return second & 0x18 != 0x08 and second & 0x06 != 0


def _behind_tags(data: bytes) -> int:
    """Where a file begins that has ID3 tags before it; else 0."""
    if not data.startswith(ID3) or len(data) < 10:
        return 0
    size = 10
    for place, byte in enumerate(data[6:10]):  # 7 bits each
        size += (byte & 0x7F) << 7 * (3 - place)
    return size


@contextmanager
def _open_flac(soundfile: Any, data: bytes) -> Iterator[SoundFile]:
    class Straight(soundfile.SoundFile):  # type: ignore[misc]
        """soundfile seeks after each block, which fails where the length is unknown."""

        def seekable(self) -> bool:
            return False

    endless = bytearray(data)
    head = endless[FLAC_SAMPLES : FLAC_SAMPLES + 5]
    promised = int.from_bytes(head, "big") & (2**36 - 1)
    if len(head) == 5:
        endless[FLAC_SAMPLES : FLAC_SAMPLES + 5] = bytes((head[0] & 0xF0, 0, 0, 0, 0))

    def blocks(file: Any) -> Iterator[Block]:
        samples = 0
        try:
            for block in _blocks(file):
                samples += len(block)
                yield block
        except soundfile.LibsndfileError:
            skip = samples
            # This one stops where the header says, before what is no FLAC: tags, say.
            with soundfile.SoundFile(io.BytesIO(data)) as whole:
                for block in _blocks(whole):
                    samples += max(0, len(block) - skip)
                    yield block[skip:]
                    skip = max(0, skip - len(block))

    with Straight(io.BytesIO(endless)) as file:
        yield SoundFile(
            file.samplerate, file.channels, promised or None, blocks(file), True, promised
        )


def _blocks(file: Any) -> Iterator[Block]:
    size = max(1, min(BLOCK // file.channels, LONGEST_BLOCK * file.samplerate))
    while len(block := file.read(size, dtype="float32", always_2d=True)):
        yield block
