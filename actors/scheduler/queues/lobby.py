"""Requests whose grammars are being compiled or whose adapters are being read, beside the queue.

A request waits here until the runners have what it needs, so that no step waits for that. In the
queue it would hold back all behind it. It keeps its rank: policies rank by arrival.

What is known here is a hint. A runner that lacks a grammar or an adapter gets it within the step,
so a lost call, a new runner or a forgotten grammar costs time and no request. A grammar that
compiles in a few milliseconds is left to that, where the runner is ready for it. Few at a time are:
a step waits for all that are new in it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rayfin.actors.errors import InvalidRequest, RayfinError
from rayfin.actors.guidance import Guidance
from rayfin.actors.histogram import Histogram
from rayfin.actors.messages import AdapterRef
from rayfin.actors.scheduler.state.executor import Executor, PendingPrepare
from rayfin.actors.scheduler.state.request import Request
from rayfin.actors.timing import PREPARE_SECONDS

MOST_KNOWN = 128
"""Grammars and adapters that count as ready in the runners, the last used ones."""

MOST_SKIPPING = 4
"""Quick grammars that requests take past here at a time, before a step has begun with them."""

GRAMMAR_FAILED = "grammar_failed"


@dataclass(slots=True)
class _Preparation:
    """A grammar or adapter on its way to the runners, and the requests that wait for it."""

    pending: PendingPrepare
    adapter: bool
    requests: dict[Request, None] = field(default_factory=dict)


class Lobby:
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
        self._compiles = False  # the runners have their vocabulary: they have answered once
        self._progress = 0.0  # when a preparation was first or last heard of

    def __len__(self) -> int:
        return len(self._missing)

    @property
    def adapters_loading(self) -> int:
        """Adapters that are being read; any thread may ask."""
        return sum(own.adapter for own in list(self._preparing.values()))

    @property
    def waiting_for_adapters(self) -> int:
        """Requests that wait for one."""
        return sum(len(own.requests) for own in list(self._preparing.values()) if own.adapter)

    def keeps(self, request: Request) -> bool:
        """Takes the request in if its grammars or its adapter are not known to be ready.

        Returns:
            Whether it waits here. ``leaving`` says when it may go.
        """
        guidance, adapter = request.source.sampling.guidance, request.source.adapter
        if guidance is None and adapter is None:
            return False
        grammars = () if guidance is None or self._skips(request, guidance) else guidance.grammars
        missing = {digest for text in grammars if (digest := self._prepare_grammar(text))}
        if adapter is not None and (digest := self._prepare_adapter(adapter)):
            missing.add(digest)
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
                self._remember(digest, preparation.adapter)
            for request in list(preparation.requests):
                missing = self._missing.get(request, set())
                missing.discard(digest)
                if error is not None:
                    if isinstance(error, str):
                        error = InvalidRequest(error, None, GRAMMAR_FAILED)
                    yield request, error
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
        self._compiles = False
        self._known.clear()
        self._preparing.clear()
        self._missing.clear()
        self._skipping.clear()
        return requests

    def _skips(self, request: Request, guidance: Guidance) -> bool:
        """Whether the request's first step compiles its grammars: they are quick, and few are new.

        A runner compiles them while it computes the first chunk, which is sooner than it answers.
        But a step of a new runner would wait for its whole vocabulary.
        """
        if not (guidance.quick and self._compiles):
            return False
        new = {digest for text in guidance.grammars if not self._knows(digest := _digest(text))}
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
                self._remember(digest, adapter=False)
            elif left := [request for request in requests if not request.ended]:
                self._skipping[digest] = left
            else:
                del self._skipping[digest]

    def _prepare_grammar(self, text: str) -> bytes | None:
        digest = _digest(text)
        return self._prepare(digest, lambda: self._executor.prepare([text]))

    def _prepare_adapter(self, adapter: AdapterRef) -> bytes | None:
        digest = bytes.fromhex(adapter.digest)
        return self._prepare(digest, lambda: self._executor.prepare([], [adapter]), adapter=True)

    def _prepare(
        self, digest: bytes, send: Callable[[], PendingPrepare], *, adapter: bool = False
    ) -> bytes | None:
        """Sends it to the runners unless they have it; returns the digest if it is waited for."""
        if self._knows(digest):
            return None
        if digest not in self._preparing:
            if not self._preparing:
                self._progress = self._clock()
            pending = send()
            if pending.done() and pending.error() is None:
                self._remember(digest, adapter)
                return None
            self._preparing[digest] = _Preparation(pending, adapter)
        return digest

    def _knows(self, digest: bytes) -> bool:
        if digest in self._known:
            self._known.move_to_end(digest)
            return True
        return False

    def _remember(self, digest: bytes, adapter: bool) -> None:
        self._compiles = self._compiles or not adapter
        self._known[digest] = None
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
