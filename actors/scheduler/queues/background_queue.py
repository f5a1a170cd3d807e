"""Background requests behind all others, in the order of their arrival."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from rayfin.actors.messages import BoolArray, Int64Array
from rayfin.actors.scheduler.queues.lazy_heap import LazyHeap
from rayfin.actors.scheduler.request import Request

NO_SLOTS: Int64Array = np.zeros(0, np.int64)


class PolicyQueue(Protocol):
    """What ``BackgroundQueue`` needs of the queue inside: see ``WaitingQueue``."""

    def __len__(self) -> int: ...
    def push(self, request: Request) -> None: ...
    def peek(self) -> Request | None: ...
    def pop(self) -> Request: ...
    def entered(self, request: Request) -> None: ...
    def discard(self, request: Request) -> None: ...
    def sampled(self, slots: Int64Array) -> None: ...
    def left(self, request: Request) -> None: ...
    def victim(self, running: Iterable[Request]) -> Request: ...


class BackgroundQueue:
    """A queue around the ``foreground`` one, whose policy never sees a background request.

    A background request is next where no other waits, and is preempted before any other.
    """

    def __init__(self, foreground: PolicyQueue, num_slots: int) -> None:
        self.foreground = foreground
        self._background: LazyHeap[Request] = LazyHeap()
        self._holds: BoolArray = np.zeros(num_slots, np.bool_)  # slots of background requests
        self._running = self._beside = 0  # requests in the foreground, and in the background

    def __len__(self) -> int:
        return len(self.foreground) + len(self._background)

    @property
    def slots(self) -> Int64Array:
        """The slots [N] of running background requests."""
        return np.flatnonzero(self._holds) if self._beside else NO_SLOTS

    @property
    def runs_foreground(self) -> bool:
        """Whether a request runs that is not in the background."""
        return self._running > 0

    @property
    def has_foreground(self) -> bool:
        """Whether a request runs or waits that is not in the background."""
        return self._running > 0 or len(self.foreground) > 0

    def push(self, request: Request) -> None:
        if request.source.background:
            self._background.push(request.order, request)
        else:
            self.foreground.push(request)

    def peek(self) -> Request | None:
        if (request := self.foreground.peek()) is not None:
            return request
        first = self._background.first()
        return first[1] if first else None

    def pop(self) -> Request:
        return self.foreground.pop() if len(self.foreground) else self._background.pop()

    def entered(self, request: Request) -> None:
        if request.source.background:
            self._beside += 1
            self._holds[request.slots] = True
        else:
            self._running += 1
            self.foreground.entered(request)

    def discard(self, request: Request) -> None:
        if request.source.background:
            self._background.discard(request)
        else:
            self.foreground.discard(request)

    def sampled(self, slots: Int64Array) -> None:
        others = slots[~self._holds[slots]] if self._beside else slots
        if len(others):
            self.foreground.sampled(others)

    def left(self, request: Request) -> None:
        if request.source.background:
            self._beside -= 1
            self._holds[request.slots] = False
        else:
            self._running -= 1
            self.foreground.left(request)

    def victim(self, running: Iterable[Request]) -> Request:
        """The latest background request; without one, as the policy has it."""
        requests = list(running)
        background = [request for request in requests if request.source.background]
        if background:
            return max(background, key=lambda request: request.order)
        return self.foreground.victim(requests)
