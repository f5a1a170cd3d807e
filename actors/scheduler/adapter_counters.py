"""What an engine knows and counts of the adapters in its runner and in its requests."""

from collections.abc import Iterable

from rayfin.actors.adapters.part import AdapterFacts, AdapterRef, AdapterStats, AdapterUsage
from rayfin.actors.metric import Histogram
from rayfin.actors.parts import PartFacts, first_of
from rayfin.actors.scheduler.request import Request


class AdapterCounters:
    """Counters from zero, and what is resident. One thread writes, any may read.

    ``load`` observes the seconds of each adapter that was read.
    """

    def __init__(self, load: Histogram) -> None:
        self.load = load
        self._usage = AdapterUsage()
        self._failed = self._evicted = 0

    def observe(self, usage: AdapterUsage) -> None:
        """A step's result has news of adapters."""
        self._usage = usage
        self._failed += usage.failed
        self._evicted += usage.evicted
        for seconds in usage.load_seconds:
            self.load.observe(seconds)

    def restart(self) -> None:
        """The runners are new and hold none."""
        self._usage = AdapterUsage()

    def stats(
        self,
        served: Iterable[PartFacts],
        requests: Iterable[Request],
        *,
        loading: int,
        requests_waiting: int,
    ) -> AdapterStats:
        """The report of an engine with ``requests``; no other thread changes that collection."""
        facts = first_of(served, AdapterFacts)
        if facts is None:
            return AdapterStats()
        running: set[str] = set()
        waiting: set[str] = set()
        for request in requests:
            adapter = request.source.part(AdapterRef)
            if adapter is not None:
                names = waiting if request.slot is None else running
                names.add(adapter.name)
        return AdapterStats(
            facts.at_once or 0,
            tuple(sorted(running)),
            tuple(sorted(waiting)),
            frozenset(self._usage.resident),
            self._usage.bytes,
            loading,
            requests_waiting,
            {"ok": self.load.count, "failed": self._failed},
            self._evicted,
        )
