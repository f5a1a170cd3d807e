"""Counters of the images of one ingress."""

from rayfin.actors.histogram import Histogram, one_two_five
from rayfin.actors.metrics.families import IMAGE_REFUSALS, LATENCY_BOUNDS
from rayfin.actors.metrics.ledger import Series

MOST_IMAGES = 1000  # of a request; one may have more than the last bucket


class ImageCounters:
    """Images of requests, seconds to fetch them, and requests refused for one.

    Used in the event loop only.
    """

    def __init__(self) -> None:
        self.images = Histogram(one_two_five(MOST_IMAGES))
        self.fetch = Histogram(LATENCY_BOUNDS)
        self._refusals = dict.fromkeys(IMAGE_REFUSALS, 0)

    def refused(self, code: str | None) -> None:
        """Counts a request that was refused for an image, by the error's code."""
        self._refusals[code if code in self._refusals else "other"] += 1

    def counters(self) -> dict[Series, float]:
        """Returns all counters, zeros included."""
        return {("image_refusals", (code,)): count for code, count in self._refusals.items()}

    def histograms(self) -> dict[str, Histogram]:
        """Returns the histograms by name."""
        return {"request_images": self.images, "image_fetch_seconds": self.fetch}
