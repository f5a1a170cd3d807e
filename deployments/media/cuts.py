"""A long recording to clips, cut where it is quiet."""

from collections.abc import Iterable, Iterator

import numpy as np

from rayfin.actors.media.audio_processor import Samples

SEARCH = 1.0  # seconds before and behind the place that a cut is near, at most
QUIET = 0.1  # seconds of a cut's surroundings, which are to be quiet
HOP = 0.01  # seconds between the places that are tried


def cut_at_quiet(blocks: Iterable[Samples], rate: int, seconds: float) -> Iterator[Samples]:
    """Yields the recording in clips of at most ``seconds``, while its blocks [N] come.

    A cut is where the power of the sound around it is least, near the longest clip's end; the last
    two clips are nearly even, since a rest of a few samples would be too short for a model.
    """
    most = max(1, int(seconds * rate))
    reach = int(min(SEARCH * rate, most / 4))
    rest = np.zeros(0, np.float32)
    for block in blocks:
        rest = np.concatenate([rest, block])
        while len(rest) >= 2 * most:
            place = _quietest(rest, most - reach, most, rate)
            yield rest[:place]
            rest = rest[place:]
    while len(rest) > most:
        even = -(-len(rest) // -(-len(rest) // most))
        place = _quietest(rest, even - reach, min(even + reach, most), rate)
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
