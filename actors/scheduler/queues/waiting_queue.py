"""What a policy decides: who of the waiting is admitted next, who of the running gives way."""

from collections.abc import Iterable
from typing import Protocol

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.queues.fair_queue import FairQueue
from rayfin.actors.scheduler.queues.ranked_queue import RankedQueue
from rayfin.actors.scheduler.state.request import Request


class WaitingQueue(Protocol):
    """The waiting requests, in the order of a policy. No operation is linear in their number.

    ``Lifecycle`` tells it of every transition: a request is pushed when it comes and when it is
    preempted (it then goes before what came after it), popped and entered when it is admitted,
    discarded when it ends while it waits; ``left`` when it gives up its slots for whatever reason.
    """

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """The request waits from now on."""
        ...

    def peek(self) -> Request | None:
        """The next request to admit, left in the queue."""
        ...

    def pop(self) -> Request:
        """Takes out what ``peek`` shows.

        Raises:
            IndexError: the queue is empty.
        """
        ...

    def entered(self, request: Request) -> None:
        """The request that was popped runs from now on, in its ``slots``."""
        ...

    def discard(self, request: Request) -> None:
        """Forgets a waiting request."""
        ...

    def sampled(self, slots: Int64Array) -> None:
        """Each of the slots [N] got one more token."""
        ...

    def left(self, request: Request) -> None:
        """The request runs no longer."""
        ...

    def victim(self, running: Iterable[Request]) -> Request:
        """Who of the running requests is preempted first."""
        ...


def make_queue(config: EngineConfig) -> WaitingQueue:
    """The queue of ``config.policy``."""
    if config.policy == "fair":
        return FairQueue(config.limits.max_decoding_batch, config.tenant_weights)
    return RankedQueue(config.policy == "priority", config.priority_aging)
