"""Guided requests whose grammars are being compiled, beside the queue.

A request waits here until the runners have its grammars, so that no step waits for a compilation.
In the queue it would hold back all behind it. It keeps its rank: policies rank by arrival.

What is known here is a hint. A runner that lacks a grammar compiles it within the step, so a lost
call, a new runner or a forgotten grammar costs time and no request.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.histogram import Histogram
from rayfin.actors.scheduler.state.executor import Executor, PendingPrepare
from rayfin.actors.scheduler.state.request import Request
from rayfin.actors.timing import PREPARE_SECONDS

MOST_KNOWN = 128
"""Grammars that count as compiled in the runners, the last used ones."""

GRAMMAR_FAILED = "grammar_failed"


@dataclass(slots=True)
class _Preparation:
    """A grammar on its way to the runners, and the requests that wait for it."""

    pending: PendingPrepare
    requests: dict[Request, None] = field(default_factory=dict)


class Lobby:
    """Keeps new requests from the queue while the runners compile their grammars.

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
        self._progress = 0.0  # when a preparation was first or last heard of

    def __len__(self) -> int:
        return len(self._missing)

    def keeps(self, request: Request) -> bool:
        """Takes the request in if one of its grammars is not known to be compiled.

        Returns:
            Whether it waits here. ``leaving`` says when it may go.
        """
        guidance = request.source.sampling.guidance
        if guidance is None:
            return False
        missing = {digest for text in guidance.grammars if (digest := self._prepare(text))}
        for digest in missing:
            self._preparing[digest].requests[request] = None
        if missing:
            self._missing[request] = missing
        return bool(missing)

    def leaving(self) -> Iterator[tuple[Request, InvalidRequest | None]]:
        """Yields requests that may join the queue, and those that must end with an error.

        The former have left. The latter stay until ``discard``.
        """
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
            for request in list(preparation.requests):
                missing = self._missing.get(request, set())
                missing.discard(digest)
                if error is not None:
                    yield request, InvalidRequest(error, None, GRAMMAR_FAILED)
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
        """The runners are new, and have no grammars; returns all requests, which have left."""
        requests = list(self._missing)
        self._known.clear()
        self._preparing.clear()
        self._missing.clear()
        return requests

    def _prepare(self, text: str) -> bytes | None:
        """Sends the grammar to the runners unless they have it; returns its digest if it waits."""
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return None
        if digest not in self._preparing:
            if not self._preparing:
                self._progress = self._clock()
            pending = self._executor.prepare([text])
            if pending.done() and pending.error() is None:
                self._remember(digest)
                return None
            self._preparing[digest] = _Preparation(pending)
        return digest

    def _remember(self, digest: bytes) -> None:
        self._known[digest] = None
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
