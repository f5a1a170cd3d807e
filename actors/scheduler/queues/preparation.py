"""Requests for which runners prepare something, beside the queue: a grammar, an adapter.

A request waits here until the runners have what it needs, so that no step waits for that. In the
queue it would hold back all behind it. It keeps its rank: policies rank by arrival.

What is known here is a hint. A runner that lacks what a request needs gets it within the step, so a
lost call, a new runner or a forgotten grammar costs time and no request. What takes a few
milliseconds is left to that, where the runner is ready for it. Few at a time are: a step waits for
all that are new in it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field

from rayfin.actors.errors import RayfinError
from rayfin.actors.metric import Histogram
from rayfin.actors.parts import Need, RequestPart
from rayfin.actors.scheduler.executor import Executor, PendingPrepare
from rayfin.actors.scheduler.request import Request
from rayfin.actors.timing import PREPARE_SECONDS

MOST_KNOWN = 128
"""Needs that count as ready in the runners, the last used ones."""

MOST_SKIPPING = 4
"""Quick needs that requests take past here at a time, before a step has begun with them."""


@dataclass(slots=True)
class _Preparation:
    """What the runners prepare, and the requests that wait for it."""

    pending: PendingPrepare
    kind: type[RequestPart]  # that needs it
    requests: dict[Request, None] = field(default_factory=dict)


class Preparations:
    """Keeps new requests from the queue while the runners prepare what they need.

    Args:
        clock: in seconds.
        waits: what the waits are counted in.
    """

    def __init__(self, executor: Executor, clock: Callable[[], float], waits: Histogram) -> None:
        self._executor = executor
        self._clock = clock
        self._waits = waits
        self._known: OrderedDict[bytes, None] = OrderedDict()  # by digest
        self._preparing: dict[bytes, _Preparation] = {}  # in order of submission
        self._missing: dict[Request, set[bytes]] = {}
        self._skipping: dict[bytes, list[Request]] = {}  # by digest, until one is admitted
        self._ready: set[type[RequestPart]] = set()  # of which the runners have prepared one
        self._progress = 0.0  # when a preparation was first or last heard of

    def __len__(self) -> int:
        return len(self._missing)

    def preparing(self, kind: type[RequestPart]) -> tuple[int, int]:
        """Returns how many needs of a kind are prepared, and how many requests wait for them.

        Any thread may ask.
        """
        preparing = [
            preparation
            for preparation in list(self._preparing.values())
            if preparation.kind is kind
        ]
        return len(preparing), sum(len(preparation.requests) for preparation in preparing)

    def keeps(self, request: Request) -> bool:
        """Takes the request in if not all that it needs is known to be ready.

        Returns:
            Whether it waits here. ``leaving`` says when it may go.
        """
        missing: set[bytes] = set()
        for part in request.source.parts:
            needs = part.needs
            if needs and not self._skips(request, part, needs):
                missing |= {need.digest for need in needs if self._lacks(need, type(part))}
        for digest in missing:
            self._preparing[digest].requests[request] = None
        if missing:
            self._missing[request] = missing
        return bool(missing)

    def leaving(self) -> Iterator[tuple[Request, RayfinError | None]]:
        """Yields requests that may join the queue, and those that must end with an error.

        The former have left. The latter stay until ``discard``.
        """
        self._end_skips()
        if not self._preparing:
            return
        now = self._clock()
        for digest, preparation in list(self._preparing.items()):
            done = preparation.pending.done()
            if not done and now - self._progress < PREPARE_SECONDS:
                continue
            # A call is lost, or a compilation hangs: then a step that hangs replaces the runner.
            self._progress = now
            error = preparation.pending.error() if done else None
            del self._preparing[digest]
            if done and error is None:
                self._remember(digest)
                self._ready.add(preparation.kind)
            for request in list(preparation.requests):
                missing = self._missing.get(request, set())
                missing.discard(digest)
                if error is not None:
                    yield request, copy(error)  # whose client names its own field in it
                elif not missing and self.discard(request):
                    self._waits.observe(now - request.arrival)
                    yield request, None

    def discard(self, request: Request) -> bool:
        """Removes the request, which has ended or may go; returns whether it was here."""
        missing = self._missing.pop(request, None)
        for digest in missing or ():
            del self._preparing[digest].requests[request]
        return missing is not None

    def restart(self) -> list[Request]:
        """The runners are new and have nothing; returns all requests, which have left."""
        requests = list(self._missing)
        self._ready.clear()
        self._known.clear()
        self._preparing.clear()
        self._missing.clear()
        self._skipping.clear()
        return requests

    def _skips(self, request: Request, part: RequestPart, needs: tuple[Need, ...]) -> bool:
        """Whether the request's first step prepares them: they are quick, and few are new.

        A runner compiles a grammar while it computes the first chunk, which is sooner than it
        answers. But a step of a new runner would wait for its whole vocabulary.
        """
        if not (part.quick and type(part) in self._ready):
            return False
        new = {need.digest for need in needs if not self._knows(need.digest)}
        if len(new | self._skipping.keys()) > MOST_SKIPPING:
            return False
        for digest in new:
            self._skipping.setdefault(digest, []).append(request)
        return True

    def _end_skips(self) -> None:
        """Those that a step has begun with are known; those that have lost all requests are not."""
        for digest, requests in list(self._skipping.items()):
            if any(request.admitted for request in requests):
                del self._skipping[digest]
                self._remember(digest)
            elif left := [request for request in requests if not request.ended]:
                self._skipping[digest] = left
            else:
                del self._skipping[digest]

    def _lacks(self, need: Need, kind: type[RequestPart]) -> bool:
        """Sends it to the runners unless they have it; returns whether it is waited for."""
        digest = need.digest
        if self._knows(digest):
            return False
        if digest not in self._preparing:
            if not self._preparing:
                self._progress = self._clock()
            pending = self._executor.prepare([need])
            if pending.done() and pending.error() is None:
                self._remember(digest)
                self._ready.add(kind)
                return False
            self._preparing[digest] = _Preparation(pending, kind)
        return True

    def _knows(self, digest: bytes) -> bool:
        if digest in self._known:
            self._known.move_to_end(digest)
            return True
        return False

    def _remember(self, digest: bytes) -> None:
        self._known[digest] = None
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
