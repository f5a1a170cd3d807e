"""How requests end: their pages are freed, and their clients get a last message."""

from collections.abc import Callable, Sequence

from rayfin.actors.errors import (
    DeadlineExceeded,
    RayfinError,
    RequestFailed,
    RequestHandedBack,
)
from rayfin.actors.messages import Ended, Float32Array, Hypothesis
from rayfin.actors.scheduler.faults.quarantine import Quarantine
from rayfin.actors.scheduler.faults.token_logs import TokenLogs
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.outbox import Outbox
from rayfin.actors.scheduler.queues.lazy_heap import LazyHeap
from rayfin.actors.scheduler.request import Request


class Endings:
    """The one place where a request ends, of whichever cause."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        quarantine: Quarantine,
        outbox: Outbox,
        clock: Callable[[], float],
    ) -> None:
        self.deadlines = Deadlines()
        self.logs = TokenLogs(clock)
        self._lifecycle = lifecycle
        self._quarantine = quarantine
        self._outbox = outbox
        self._clock = clock

    def abort(self, client: str, key: int, reason: str) -> None:
        """Ends a request of which its client wants no more. Unknown keys are ignored.

        Args:
            reason: what it is counted under.
        """
        request = self._lifecycle.state.live.pop((client, key), None)
        if request is not None:
            self._forget(request)
            self._lifecycle.finish(request, reason)
            if request.source.receipt is not None:
                self.logs.keep(request)

    def end(
        self,
        request: Request,
        reason: str,
        stop_reason: int | str | None = None,
        error: RayfinError | None = None,
        hypotheses: Sequence[Hypothesis] = (),
        vector: Float32Array | None = None,
    ) -> None:
        """Ends a request and delivers its end.

        Args:
            reason: the finish reason that its client gets.
            vector: [D], of a request that samples no tokens.
        """
        source, state = request.source, self._lifecycle.state
        del state.live[source.client, source.key]
        self._forget(request)
        moved = isinstance(error, RequestHandedBack)
        spoiled = isinstance(error, RequestFailed)
        self._lifecycle.finish(request, "moved" if moved else reason, spoiled=spoiled)
        if error is not None and not moved:
            state.counters.failure(error)
        if error is None and source.receipt is not None:
            self.logs.keep(request, None if reason == "abort" else reason, stop_reason)
        cached = request.cached_tokens
        self._outbox.end(
            source.client,
            Ended(
                *(source.key, reason, stop_reason, error, cached, list(hypotheses)),
                *(request.deaths, *request.waits(self._clock()), vector),
            ),
        )

    def expire(self) -> None:
        """Ends the requests whose deadline has passed."""
        now = self._clock()
        for request in self.deadlines.take_due(now):
            self.end(request, "error", error=exceeded(request, now))

    def _forget(self, request: Request) -> None:
        self.deadlines.discard(request)
        self._quarantine.discard(request)
        self._lifecycle.state.repetitions.watched.pop(request, None)


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
    """Returns the error of a request that is due."""
    limit = f"the request's timeout of {request.source.timeout:g} s has passed"
    if request.admitted_at is None:
        waited = now - request.arrival
        return DeadlineExceeded(f"{limit}: it waited {waited:.3f} s and was not begun", "timeout")
    waited = request.admitted_at - request.arrival
    ran = now - request.admitted_at
    return DeadlineExceeded(
        f"{limit}: it waited {waited:.3f} s, and was not done {ran:.3f} s later", "timeout"
    )
