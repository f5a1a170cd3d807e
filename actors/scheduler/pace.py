"""How fast requests end, and so when a refused one may try again."""

import math
from collections import deque

WINDOW_SECONDS = 30.0
SAMPLE_SECONDS = 1.0
MAX_WAIT = 60  # seconds; also the answer while nothing ends


class Pace:
    """The rate at which requests have ended lately, from a counter that somebody else keeps."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # (seconds, requests ended until then)

    def observe(self, now: float, ended: int) -> None:
        """Takes note of the counter; cheap enough for every request."""
        samples = self._samples
        if samples and now - samples[-1][0] < SAMPLE_SECONDS:
            return
        samples.append((now, ended))
        while now - samples[0][0] > WINDOW_SECONDS and len(samples) > 2:
            samples.popleft()

    def seconds_until_half(self, waiting: int, now: float, ended: int) -> int:
        """Whole seconds, 1 to MAX_WAIT, until half of a queue of ``waiting`` has gone at this rate.

        Half, because all that are refused come back together.
        """
        if not self._samples or ended <= self._samples[0][1]:
            return MAX_WAIT
        start, before = self._samples[0]
        rate = (ended - before) / max(now - start, 1e-3)
        return max(1, min(MAX_WAIT, math.ceil(waiting / 2 / rate)))
