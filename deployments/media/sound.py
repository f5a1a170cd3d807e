"""Files and arrays of audio to clips of one channel, within limits. It takes a core: never on the
event loop.

``soundfile`` and ``av`` decode, ``soxr`` changes the rate: the extra ``rayfin[audio]``.
"""

import importlib
import math
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rayfin.actors.errors import InvalidConfig, InvalidRequest
from rayfin.actors.media.audio_processor import CODE, Samples
from rayfin.deployments.media.containers import container_of, open_container
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.media.sound_files import SoundFile, open_sound

RATES = (1000, 384_000)  # samples a second
MAX_CHANNELS = 8
NUMBERS_PER_SECOND = 2 * 48_000  # most numbers of all channels, for each second that is allowed
LOUDEST = 1000.0  # of what is 1 at full scale: squares of more become infinite


def audio_off() -> str | None:
    """Why this process decodes no audio; None: it does."""
    return _missing("soundfile") or _missing("soxr")


def _missing(name: str) -> str | None:
    try:
        _package(name)
    except InvalidConfig:
        return f"{name} is not installed (pip install 'rayfin[audio]')"
    return None


class Longest(NamedTuple):
    """How long something may be, and the setting that says so."""

    seconds: float
    name: str = "max_audio_seconds"


class Clips:
    """Opens clips: files, or arrays of Python's.

    Args:
        rate: samples a second of the clips that it gives.
    """

    def __init__(self, settings: MediaSettings, rate: int) -> None:
        self._longest, self._rate = Longest(settings.max_seconds), rate
        self._recording = Longest(settings.max_upload_seconds, "max_audio_upload_seconds")

    def decode(self, data: bytes, param: str) -> Samples:
        """A file as a clip. Its length is checked before any sample is decoded, and while they are.

        Raises:
            InvalidRequest: no audio, broken, of another format, too long, or empty.
        """
        return np.concatenate(list(self._blocks(data, param, self._longest)))

    def recording(self, data: bytes, param: str) -> Iterator[Samples]:
        """As ``decode``, by blocks [N], of a file that is cut into clips: it may be longer."""
        return self._blocks(data, param, self._recording)

    def _blocks(self, data: bytes, param: str, longest: Longest) -> Iterator[Samples]:
        form = container_of(data)
        if form is not None and (off := _missing("av")):
            raise InvalidRequest(f"'{param}' is no audio that can be read: {off}.", param, CODE)
        try:
            opened = (
                open_sound(_package("soundfile"), data)
                if form is None
                else open_container(_package("av"), data, form)
            )
            with opened as file:
                yield from self._read(file, param, longest)
        except (InvalidRequest, InvalidConfig):
            raise
        except Exception as error:  # of libsndfile, or of what a broken file makes of its numbers
            raise InvalidRequest(
                f"'{param}' is no audio that can be read; WAV, FLAC, OGG, MP3, M4A, MP4 and WebM "
                "are.",
                param,
                CODE,
            ) from error

    def given(self, value: Any, param: str) -> Samples:
        """Samples [N] or [channels, N], or a pair of them and their rate, as a clip.

        Raises:
            InvalidRequest: it is something else, too long, or empty.
        """
        rate: Any = self._rate
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Real):
            value, rate = value
        samples = _samples(value, param)
        channels = len(samples) if samples.ndim == 2 else 1
        self._check(samples.shape[-1], rate, param, self._longest, channels)
        mono = samples if samples.ndim == 1 else samples.mean(axis=0)
        clip = np.concatenate(list(_resampled([mono], float(rate), self._rate)))
        return self._finite(clip, param)

    def _read(self, file: SoundFile, param: str, longest: Longest) -> Iterator[Samples]:
        first = file.samples
        if first is None and not file.to_its_end:
            raise InvalidRequest(f"'{param}' has a header that gives no length.", param, CODE)
        self._check(1 if first is None else first, file.rate, param, longest, file.channels)
        limit, samples = int(longest.seconds * file.rate), 0

        def blocks() -> Iterator[Samples]:
            nonlocal samples
            for block in file.blocks:
                samples += len(block)
                self._check(min(samples, limit + 1), file.rate, param, longest, file.channels)
                yield block.mean(axis=1)

        for block in _resampled(blocks(), file.rate, self._rate):
            yield self._finite(block, param)
        self._check(samples, file.rate, param, longest)
        if samples < file.least:
            raise InvalidRequest(
                f"'{param}' ends early: "
                f"it has {samples} of the {file.least} samples of its header.",
                param,
                CODE,
            )

    @staticmethod
    def _check(frames: int, rate: float, param: str, longest: Longest, channels: int = 1) -> None:
        if channels > MAX_CHANNELS:
            raise InvalidRequest(
                f"'{param}' has {channels} channels; at most {MAX_CHANNELS} are taken.", param, CODE
            )
        if not RATES[0] <= rate <= RATES[1]:
            raise InvalidRequest(
                f"'{param}' has {rate:g} samples a second; {RATES[0]} to {RATES[1]} are taken.",
                param,
                CODE,
            )
        if frames <= 0:
            raise InvalidRequest(f"'{param}' is empty: it has no samples.", param, CODE)
        if frames > longest.seconds * rate:
            raise InvalidRequest(
                f"'{param}' has over {longest.seconds:g} seconds of audio, the most that are "
                f"taken ({longest.name}).",
                param,
                CODE,
            )
        if frames * channels > longest.seconds * NUMBERS_PER_SECOND:
            raise InvalidRequest(
                f"'{param}' has {frames * channels} samples in all channels, more than "
                f"{longest.seconds:g} seconds at {NUMBERS_PER_SECOND} a second "
                f"({longest.name}).",
                param,
                CODE,
            )

    @staticmethod
    def _finite(clip: Samples, param: str) -> Samples:
        if not np.isfinite(clip).all():
            raise InvalidRequest(f"'{param}' has samples that are no numbers.", param, CODE)
        if np.abs(clip).max(initial=0.0) > LOUDEST:
            raise InvalidRequest(
                f"'{param}' has samples beyond {LOUDEST:g}; 1 is full scale.", param, CODE
            )
        return clip


def _resampled(blocks: Iterable[Any], rate: float, wanted: int) -> Iterator[Samples]:
    """The blocks [N] at the rate that is wanted."""
    if math.isclose(rate, wanted):
        yield from (np.asarray(block, np.float32) for block in blocks)
        return
    stream = _package("soxr").ResampleStream(rate, wanted, 1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(np.ascontiguousarray(block, np.float32))
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)


def _samples(value: Any, param: str) -> npt.NDArray[Any]:
    """An array [N] or [channels, N] of floats; whole numbers are scaled as files have them."""
    if hasattr(value, "detach"):  # a tensor of torch's
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    try:
        samples = np.asarray(value)
    except ValueError:  # rows of several lengths
        samples = np.asarray(None)
    if samples.ndim == 2 and samples.shape[0] > samples.shape[1]:  # as soundfile gives them
        samples = samples.T
    # Whole numbers of 64 bits are what a list of Python's becomes: their scale is not known.
    known = samples.dtype.kind == "f" or (samples.dtype.kind == "i" and samples.itemsize < 8)
    if not known or samples.ndim not in (1, 2):
        raise InvalidRequest(
            f"'{param}' must be an array of samples, or a pair (array, samples a second).",
            param,
            "invalid_type",
        )
    if samples.dtype.kind == "i":
        return samples.astype(np.float32) / np.float32(2 ** (8 * samples.itemsize - 1))
    return samples.astype(np.float32)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: without its library
        raise InvalidConfig(
            f"audio needs {name}, which is not installed: pip install 'rayfin[audio]', or serve "
            "without audio (language_model_only)",
            "model",
        ) from error


# A long recording to clips, cut where it is quiet.


SEARCH = 1.0  # seconds before and behind the place that a cut is near, at most
QUIET = 0.1  # seconds of a cut's surroundings, which are to be quiet
HOP = 0.01  # seconds between the places that are tried


def cut_at_quiet(blocks: Iterable[Samples], rate: int, seconds: float) -> Iterator[Samples]:
    """Yields the recording in clips of at most ``seconds``, while its blocks [N] come.

    A cut is where the power of the sound around it is least, near the longest clip's end; the last
    two clips are nearly even, since a rest of a few samples would be too short for a model.
    """
    longest = max(1, int(seconds * rate))
    reach = int(min(SEARCH * rate, longest / 4))
    rest = np.zeros(0, np.float32)
    for block in blocks:
        rest = np.concatenate([rest, block])
        while len(rest) >= 2 * longest:
            place = _quietest(rest, longest - reach, longest, rate)
            yield rest[:place]
            rest = rest[place:]
    while len(rest) > longest:
        even = -(-len(rest) // -(-len(rest) // longest))
        place = _quietest(rest, even - reach, min(even + reach, longest), rate)
        yield rest[:place]
        rest = rest[place:]
    if len(rest):
        yield rest


def _quietest(clip: Samples, first: int, last: int, rate: int) -> int:
    """The quietest place in [first, last]; of several alike the last one."""
    window, hop = int(QUIET * rate), max(1, int(HOP * rate))
    if last - first <= window:
        return max(1, last)
    powers = np.concatenate([[0.0], np.cumsum(np.square(clip[first:last], dtype=np.float64))])
    starts = np.arange(last - first - window, -1, -hop)
    return int(first + starts[np.argmin(powers[starts + window] - powers[starts])] + window // 2)
