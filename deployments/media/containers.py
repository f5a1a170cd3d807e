"""Sound in containers that video has too: M4A, MP4 and MOV, WebM and Matroska.

PyAV decodes them by FFmpeg's libraries, which know many more formats: they get the one that
the first bytes name, decode no codec but those here, and open no other file.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np

from rayfin.deployments.media.sound_files import Block, SoundFile

Container: TypeAlias = Literal["mov", "matroska"]
"""As FFmpeg calls them."""

CODECS = {"aac", "mp3", "opus", "vorbis", "flac", "alac", "pcm_s16le", "pcm_s16be", "pcm_f32le"}
EBML = b"\x1aE\xdf\xa3"


def container_of(data: bytes) -> Container | None:
    """Returns which container a file begins as, if any."""
    if data.startswith(EBML):
        return "matroska"
    return "mov" if data[4:8] == b"ftyp" else None


@contextmanager
def open_container(av: Any, data: bytes, form: Container) -> Iterator[SoundFile]:
    """Opens the first track of sound.

    Args:
        av: the package.

    Raises:
        Exception: of FFmpeg's, or ValueError: it has no sound, or in another codec. Also while
            blocks are read.
    """
    with av.open(io.BytesIO(data), format=form, io_open=_refuse) as container:
        if not container.streams.audio:
            raise ValueError("no sound")
        track = container.streams.audio[0]
        codec = track.codec_context
        if codec.codec.canonical_name not in CODECS:
            raise ValueError(codec.codec.canonical_name)
        rate = codec.sample_rate
        seconds = (container.duration or 0) / 1e6
        if track.duration:
            seconds = float(track.duration * track.time_base)
        samples = round(seconds * rate) or None  # a browser that records writes no length
        blocks = _blocks(av, container, track)
        yield SoundFile(rate, len(codec.layout.channels), samples, blocks, True)


def _blocks(av: Any, container: Any, track: Any) -> Iterator[Block]:
    """Blocks of about a second. Frames may have another rate or layout than the header says."""
    codec = track.codec_context
    plain = av.AudioResampler(format="fltp", layout=codec.layout, rate=codec.sample_rate)
    held: list[Block] = []
    for frame in container.decode(track):
        held += [part.to_ndarray().T for part in plain.resample(frame)]
        if sum(map(len, held)) >= codec.sample_rate:
            yield np.concatenate(held)
            held = []
    held += [part.to_ndarray().T for part in plain.resample(None)]
    if held:
        yield np.concatenate(held)


def _refuse(url: str, *_: Any) -> NoReturn:
    raise ValueError("another file")
