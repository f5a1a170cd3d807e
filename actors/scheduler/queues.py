"""The waiting requests, in the order in which they will be admitted."""

import heapq

from rayfin.actors.config import Policy
from rayfin.actors.scheduler.request import Request


class WaitingQueue:
    """A heap by (priority, arrival); ``fcfs`` ignores priorities.

    A preempted request keeps its arrival number, so it comes back in front of everything that
    arrived after it. ``discard`` is O(1): the entry is skipped when it reaches the top.
    """

    def __init__(self, policy: Policy) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[int, int, Request]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def rank(self, request: Request) -> tuple[int, int]:
        """Smaller is sooner; among running requests the largest is preempted first."""
        return (request.source.priority if self._by_priority else 0, request.order)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (*self.rank(request), request))
        self._live += 1

    def peek(self) -> Request | None:
        """The next request, left in the queue."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """Takes out what ``peek`` shows.

        Raises:
            IndexError: the queue is empty.
        """
        request = self.peek()
        if request is None:
            raise IndexError("no request waits")
        heapq.heappop(self._heap)
        self._live -= 1
        return request

    def discard(self, request: Request) -> None:
        """Forgets a waiting request."""
        request.cancelled = True
        self._live -= 1
