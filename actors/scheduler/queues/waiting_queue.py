"""What a queueing policy decides: the next request to admit, and the next to preempt."""

from collections.abc import Iterable
from typing import Protocol

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.queues.background_queue import BackgroundQueue
from rayfin.actors.scheduler.queues.fair_queue import FairQueue
from rayfin.actors.scheduler.queues.ranked_queue import RankedQueue
from rayfin.actors.scheduler.request import Request


class WaitingQueue(Protocol):
    """The waiting requests, in the order of a policy. No operation is linear in their number.

    ``Lifecycle`` calls it at every transition: ``push`` when a request arrives or is preempted
    (then it goes before later arrivals), ``pop`` and ``entered`` when it is admitted, ``discard``
    when it ends while it waits, ``left`` when it frees its slots for any reason.
    """

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Adds a request."""
        ...

    def peek(self) -> Request | None:
        """Returns the next request to admit, which stays, or None if the queue is empty."""
        ...

    def pop(self) -> Request:
        """Removes and returns the request of ``peek``.

        Raises:
            IndexError: the queue is empty.
        """
        ...

    def entered(self, request: Request) -> None:
        """The popped request holds its ``slots`` now."""
        ...

    def discard(self, request: Request) -> None:
        """Removes a waiting request."""
        ...

    def sampled(self, slots: Int64Array) -> None:
        """Each of the slots [N] got one more token."""
        ...

    def left(self, request: Request) -> None:
        """The request has freed its slots."""
        ...

    def victim(self, running: Iterable[Request]) -> Request:
        """The running request that is preempted first."""
        ...


def make_queue(config: EngineConfig) -> BackgroundQueue:
    """The queue of ``config.policy``, with background requests behind it."""
    slots = config.limits.max_decoding_batch
    queue: WaitingQueue
    if config.policy == "fair":
        queue = FairQueue(slots, config.tenant_weights)
    else:
        queue = RankedQueue(config.policy == "priority", config.priority_aging)
    return BackgroundQueue(queue, slots)
