"""What keeps requests beside the queue: in it they would hold back all behind them."""

from collections.abc import Iterator
from typing import Protocol

from rayfin.actors.errors import RayfinError
from rayfin.actors.scheduler.request import Request


class Beside(Protocol):
    """A place where a request waits for something, before the queue. ``Lifecycle`` lists them.

    A request passes them in their order, on its way into the queue.
    """

    def __len__(self) -> int:
        """Requests that wait here."""
        ...

    def keeps(self, request: Request) -> bool:
        """Takes the request in if it has to wait; ``leaving`` says when it may go."""
        ...

    def leaving(self) -> Iterator[tuple[Request, RayfinError | None]]:
        """Yields requests that may go on, which have left, and those that must end with an error,
        which stay until ``discard``."""
        ...

    def discard(self, request: Request) -> bool:
        """The request ends, and holds no slot; returns whether it was here."""
        ...

    def restart(self) -> list[Request]:
        """The runners are new; returns requests that may go on, which have left."""
        ...
