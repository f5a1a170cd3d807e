"""Requests with a timeout, and which of them are due."""

from rayfin.actors.errors import DeadlineExceeded
from rayfin.actors.scheduler.queues.lazy_heap import LazyHeap
from rayfin.actors.scheduler.request import Request


class Deadlines:
    """A heap by deadline: a step in which no request is due costs one comparison."""

    def __init__(self) -> None:
        self._heap: LazyHeap[Request] = LazyHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, request: Request) -> None:
        """Adds the request, if it has a timeout."""
        if request.source.timeout is not None:
            self._heap.push(request.arrival + request.source.timeout, request)

    def discard(self, request: Request) -> None:
        """The request has ended."""
        self._heap.discard(request)

    def take_due(self, now: float) -> list[Request]:
        """Removes and returns the requests whose deadline is ``now`` or before."""
        due: list[Request] = []
        while (first := self._heap.first()) is not None and first[0] <= now:
            due.append(self._heap.pop())
        return due


def exceeded(request: Request, now: float) -> DeadlineExceeded:
    """The error of a request that is due."""
    limit = f"the request's timeout of {request.source.timeout:g} s has passed"
    if request.admitted_at is None:
        waited = now - request.arrival
        return DeadlineExceeded(f"{limit}: it waited {waited:.3f} s and was not begun", "timeout")
    waited = request.admitted_at - request.arrival
    ran = now - request.admitted_at
    return DeadlineExceeded(
        f"{limit}: it waited {waited:.3f} s, and was not done {ran:.3f} s later", "timeout"
    )
