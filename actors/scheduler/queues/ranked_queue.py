"""First come, first served; or by priority, with aging against starvation."""

from collections.abc import Iterable

from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.queues.lazy_heap import LazyHeap
from rayfin.actors.scheduler.request import Request


class RankedQueue:
    """A heap by a rank that is fixed when the request arrives.

    With priorities the rank is (arrival + priority x ``aging``, order): a request that has waited
    ``aging`` seconds ranks like one that arrives now with a priority one level better. Both age
    equally from then on, so their order never changes. The wait of a request is bounded: those that
    arrive more than ``aging`` seconds per level later rank behind it. With ``aging`` 0 priorities
    are strict, as in vLLM, and low ones may starve.
    """

    def __init__(self, by_priority: bool, aging: float) -> None:
        self._by_priority = by_priority
        self._aging = aging
        self._heap: LazyHeap[Request] = LazyHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def rank(self, request: Request) -> tuple[float, int]:
        """Smaller is sooner; among running requests the largest is preempted first."""
        if not self._by_priority:
            return (0.0, request.order)
        priority = request.source.priority
        if not self._aging:
            return (priority, request.order)
        return (request.arrival + priority * self._aging, request.order)

    def push(self, request: Request) -> None:
        self._heap.push(self.rank(request), request)

    def peek(self) -> Request | None:
        first = self._heap.first()
        return first[1] if first else None

    def pop(self) -> Request:
        return self._heap.pop()

    def entered(self, request: Request) -> None:
        pass

    def discard(self, request: Request) -> None:
        self._heap.discard(request)

    def sampled(self, slots: Int64Array) -> None:
        pass

    def left(self, request: Request) -> None:
        pass

    def victim(self, running: Iterable[Request]) -> Request:
        """The last by rank."""
        return max(running, key=self.rank)
