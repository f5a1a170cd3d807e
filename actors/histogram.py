"""A histogram of fixed buckets in plain lists: observing is a search and two additions, no lock."""

from bisect import bisect_left
from dataclasses import dataclass, field

Bounds = tuple[float, ...]


@dataclass(slots=True)
class Histogram:
    """Counts by bucket. One thread observes; another one may copy it meanwhile.

    Args:
        bounds: upper ends of the buckets, inclusive, ascending; beyond the last there is one more.
    """

    bounds: Bounds
    counts: list[int] = field(default_factory=list)  # [len(bounds) + 1]
    sum: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> "Histogram":
        return Histogram(self.bounds, self.counts.copy(), self.sum)

    def grown_since(self, earlier: "Histogram | None") -> "Histogram":
        """What was observed since ``earlier``; everything, if that had other buckets or is None."""
        if earlier is None or earlier.bounds != self.bounds:
            return self
        counts = [now - then for now, then in zip(self.counts, earlier.counts, strict=True)]
        return Histogram(self.bounds, counts, self.sum - earlier.sum)

    def add(self, more: "Histogram") -> None:
        """Observations of the same buckets, made elsewhere."""
        self.counts = [own + new for own, new in zip(self.counts, more.counts, strict=True)]
        self.sum += more.sum

    def cumulative(self, bounds: Bounds | None = None) -> list[tuple[float, int]]:
        """(upper end, observations up to it), infinity last; of ``bounds``, which are some of ours.

        Raises:
            ValueError: one of ``bounds`` is not a bound of this histogram.
        """
        totals, total = [], 0
        for count in self.counts:
            total += count
            totals.append(total)
        if bounds is None:
            buckets = list(zip(self.bounds, totals[:-1], strict=True))
        else:
            buckets = [(bound, totals[self.bounds.index(bound)]) for bound in bounds]
        return [*buckets, (float("inf"), total)]


def one_two_five(most: int) -> Bounds:
    """1, 2, 5, 10, 20, 50 ... up to ``most``: buckets of token counts."""
    steps = (factor * 10**power for power in range(len(str(most))) for factor in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= most)
