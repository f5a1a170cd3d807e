"""Where requests wait at an ingress while there is no engine, and have one started."""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from rayfin.actors.scheduler.queues.queue_limits import QueueLimits
from rayfin.actors.timing import WAITING_ROOM_PAUSE_SECONDS

logger = logging.getLogger(__name__)

MOST_WAITING = 4096


class WaitingRoom:
    """As bounded as an engine's queue if it has engines started; limits are a replica's own.

    Args:
        start: returns when an engine has been started; called while anybody waits, and cancelled
            when none does. None where engines are not started on demand.
    """

    def __init__(
        self,
        max_requests: int = MOST_WAITING,
        max_tokens: int | None = None,
        start: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._limits = QueueLimits(max_requests, max_tokens)
        self._start = start
        self._waiting = 0
        self._starting: asyncio.Task[None] | None = None
        # Ray cancels the calls that a cancelled request has made: this one belongs to no request.
        self._context = contextvars.copy_context()

    @property
    def starts_engines(self) -> bool:
        return self._start is not None

    @property
    def is_quiet(self) -> bool:
        """Whether there need be no engine: none is wanted, and would be started if one were."""
        return self.starts_engines and not self._waiting

    def check(self, tokens: int) -> None:
        """Whether a new prompt of so many tokens may wait.

        Where engines are not started on demand any may: a wait is short, or fails, and an engine
        that comes back has limits of its own.

        Raises:
            Overloaded: too much does already.
        """
        if self.starts_engines:
            self._limits.check(tokens)

    @contextmanager
    def waiting(self, tokens: int = 0) -> Iterator[None]:
        """One more waits, with a prompt of so many tokens."""
        self._waiting += 1
        self._limits.num_requests += 1
        self._limits.num_tokens += tokens
        if self._starting is None and self._start is not None:
            work = self._have_started(self._start)
            self._starting = asyncio.create_task(work, context=self._context)
        try:
            yield
        finally:
            self._waiting -= 1
            self._limits.num_requests -= 1
            self._limits.num_tokens -= tokens
            if not self._waiting and self._starting is not None:
                self._starting.cancel()
                self._starting = None

    async def _have_started(self, start: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                await start()
            except (RayError, RayServeException) as error:
                logger.warning("an engine cannot be asked for: %s", error)
            await asyncio.sleep(WAITING_ROOM_PAUSE_SECONDS)


def starter(engines: Any) -> Callable[[], Awaitable[object]]:
    """Has Serve start an engine by a call to ``engines``, the handle of their deployment.

    Without a replica the handle queues the call, and for what is queued Serve's controller starts
    one at once; the call is answered when its engine is ready.
    """

    async def start() -> None:
        response = engines.started.remote()
        try:
            await response
        finally:
            response.cancel()

    return start
