"""First come, first served; or by priority, with aging so that nobody starves."""

from collections.abc import Iterable

from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.queues.lazy_heap import LazyHeap
from rayfin.actors.scheduler.state.request import Request


class RankedQueue:
    """A heap by a rank that is decided once, when the request comes.

    With priorities the rank is (arrival + priority x ``aging``, order): a request that has waited
    ``aging`` seconds weighs as much as one that comes now, one level better. Both wait equally from
    then on, so their order never changes and nothing is sorted again. What comes later than
    ``aging`` seconds per level of difference goes behind: that bounds the wait of every request.
    With ``aging`` 0 levels are strict, as in vLLM, and a low one may starve.
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
        """The last by rank: so the first always advances."""
        return max(running, key=self.rank)
