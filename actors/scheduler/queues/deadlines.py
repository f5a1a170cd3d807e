"""Requests with a time limit of their own, and whose has passed."""

from rayfin.actors.errors import DeadlineExceeded
from rayfin.actors.scheduler.queues.lazy_heap import LazyHeap
from rayfin.actors.scheduler.state.request import Request


class Deadlines:
    """A heap by deadline, so that a step where nothing is due costs one comparison."""

    def __init__(self) -> None:
        self._heap: LazyHeap[Request] = LazyHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, request: Request) -> None:
        """From its arrival the request has ``timeout`` seconds, if it has such a limit."""
        if request.source.timeout is not None:
            self._heap.push(request.arrival + request.source.timeout, request)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._heap.discard(request)

    def take_due(self, now: float) -> list[Request]:
        """The requests whose deadline is ``now`` or before; they are watched no longer."""
        due: list[Request] = []
        while (first := self._heap.first()) is not None and first[0] <= now:
            due.append(self._heap.pop())
        return due


def exceeded(request: Request, now: float) -> DeadlineExceeded:
    """What to tell the client of a request that is due."""
    limit = f"the request's timeout of {request.source.timeout:g} s has passed"
    if request.admitted_at is None:
        waited = now - request.arrival
        return DeadlineExceeded(f"{limit}: it waited {waited:.3f} s and was not begun", "timeout")
    waited = request.admitted_at - request.arrival
    ran = now - request.admitted_at
    return DeadlineExceeded(
        f"{limit}: it waited {waited:.3f} s, and was not done {ran:.3f} s later", "timeout"
    )
