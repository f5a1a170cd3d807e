"""How long sessions pause, learned from those that came back and those that have not.

The law is a rate of returns by age: seconds since the last token. It has no parameter to set. Its
*index* of a pause that has lasted so long says what keeping it is worth: the most returns that a
second of keeping brings, over all times until which one may keep it (Gittins).
"""

import math
from bisect import bisect_right

FIRST, GROWTH, BUCKETS = 0.25, 1.6, 21
STARTS = (0.0, *(FIRST * GROWTH**place for place in range(BUCKETS - 1)))
"""Ages, in seconds, at which buckets begin. The last one, from 38 minutes on, has no end."""

WIDTHS = tuple(
    after - before for before, after in zip(STARTS, (*STARTS[1:], STARTS[-1] * GROWTH), strict=True)
)
ASSUMED_PAUSES = 2
"""What is assumed counts as much as so many pauses that have passed a bucket."""

SCAN_PAUSES, HALF_LIFE_PAUSES = 16, 4000


class PauseLaw:
    """Counts returns and seconds at risk by age; the index follows each few pauses."""

    def __init__(self) -> None:
        self._returns = [0.0] * BUCKETS
        self._seconds = [0.0] * BUCKETS
        self._assumed = [ASSUMED_PAUSES * width for width in WIDTHS]
        self._index: list[float] = []
        self._pauses = 0
        self._scan()

    def observe(self, since: float, until: float, *, returned: bool) -> None:
        """A pause went on from one age to another, in seconds, and ended then if ``returned``."""
        place = bucket(since)
        while since < until:
            end = STARTS[place + 1] if place + 1 < BUCKETS else math.inf
            self._seconds[place] += min(end, until) - since
            since, place = end, place + 1
        if not returned:
            return
        self._returns[bucket(until)] += 1
        self._pauses += 1
        if self._pauses % HALF_LIFE_PAUSES == 0:
            self._returns = [count / 2 for count in self._returns]
            self._seconds = [seconds / 2 for seconds in self._seconds]
        if self._pauses % SCAN_PAUSES == 0:
            self._scan()

    def index(self, age: float) -> float:
        """Returns a second, at best, of a pause that has lasted ``age`` seconds."""
        return self._index[bisect_right(STARTS, age, 1) - 1]  # bucket(age), of many sessions

    def rate(self, place: int) -> float:
        """Returns a second in a bucket; at first 0.4 / (age + 0.5 s)."""
        assumed, middle = self._assumed[place], STARTS[place] + WIDTHS[place] / 2
        returns = self._returns[place] + assumed * 0.4 / (middle + 0.5)
        return returns / (self._seconds[place] + assumed)

    def _scan(self) -> None:
        rates = [self.rate(place) for place in range(BUCKETS)]
        self._index = [best_ratio(rates[place:], WIDTHS[place:]) for place in range(BUCKETS)]


def bucket(age: float) -> int:
    """The bucket of an age in seconds."""
    return bisect_right(STARTS, age, 1) - 1


def best_ratio(rates: list[float], widths: tuple[float, ...]) -> float:
    """The highest P(returned) / E[seconds kept] over the ends of the buckets."""
    best, left, kept = 0.0, 1.0, 0.0
    for rate, width in zip(rates, widths, strict=True):
        gone = -math.expm1(-rate * width)
        kept += left * gone / rate
        left *= 1 - gone
        best = max(best, (1 - left) / kept)
    return best
