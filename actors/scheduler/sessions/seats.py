"""Who of more sessions than fit keeps its pages: seats.

    new ─────► parked ────► queued ────► running ────► paused ────► queued
    lapsed ──►        room                               └─► lapsed: price, pages needed, rotation

A session with a seat has its pages claimed over its pauses, and its turns go straight to the queue.
The next request of one without a seat is parked beside the queue, so that some sessions wait whole
in place of all throwing each other's pages out in turn. With room for all of them a seat is had at
once, and nothing is different. Requests that are no turns never wait here.

What a paused seat is *worth*, in seconds of the engine for a page and second: what its pages take
to be computed or read, times the rate at which such pauses end, by the pages that it alone claims.
What it *costs* is a price: while its pages are computed, those of all running requests wait.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from rayfin.actors.config import EngineConfig
from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import EngineRequest
from rayfin.actors.scheduler.page_tier import PageTier
from rayfin.actors.scheduler.queues.fair_queue import FairQueue
from rayfin.actors.scheduler.queues.ranked_queue import RankedQueue
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import SchedulerState
from rayfin.actors.scheduler.sessions.sessions import Session, SessionTable, is_turn
from rayfin.actors.timing import LOBBY_TICK_SECONDS, PAGES_HELD_SECONDS, PARKED_SECONDS

MARGIN = 0.03
"""Share of all pages that are held or claimed that stays free for them to grow."""

ROTATION = 8.0
"""A seat goes to who has waited for long after so many times its pages' seconds, so that swaps take
a ninth of the time at most."""


class Seats:
    """Parks turns of sessions, and decides which sessions have seats. A ``Beside``."""

    def __init__(
        self,
        state: SchedulerState,
        tier: PageTier,
        clock: Callable[[], float],
        weights: dict[str, float] | None = None,
    ) -> None:
        self._state = state
        self._tables = state.tables
        self._tier = tier
        self._clock = clock
        queue = state.waiting.foreground
        ranked = queue if isinstance(queue, RankedQueue) else None
        rank: Callable[[Request], Any] = ranked.rank if ranked else lambda request: request.order
        self._weights = weights if isinstance(queue, FairQueue) else None
        self.sessions = SessionTable(state.tables, clock, rank)
        self._parked: dict[Request, float] = {}  # since when
        self._ready: list[Request] = []  # that have got seats, and are on their way to the queue
        self._promised: dict[Request, int] = {}  # pages that they take when they are admitted
        self._next_look = 0.0
        self._held, self._held_at = 0.0, -math.inf  # mean pages of running requests, and until when
        self._idle_since: float | None = None  # since when none but parked ones are here
        state.tables.reclaim = self.reclaim
        state.queue_limits.spares = self.spares

    def __len__(self) -> int:
        return len(self._parked) + len(self._ready)

    def spares(self, source: EngineRequest) -> bool:
        """Whether a request is a turn of a session with a seat, which no full queue refuses."""
        session = self.sessions.find(source)
        return session is not None and session.seated is not None

    def keeps(self, request: Request) -> bool:
        """Parks a turn of a session without a seat, unless there is room for it."""
        if not is_turn(request.source):
            return False
        session = self.sessions.begin(request)
        if session.seated is not None:
            self._promised[request] = self._missing(request)
            return False
        self._parked[request] = self._clock()
        self._look()
        if request not in self._ready:
            return True
        self._ready.remove(request)
        return False

    def leaving(self) -> Iterator[tuple[Request, RayfinError | None]]:
        """Yields requests whose sessions have got seats. It looks for room each 50 ms."""
        if not self._parked and not self._ready:
            return
        if self._clock() >= self._next_look:
            self._look()
        ready, self._ready = self._ready, []
        for request in ready:
            yield request, None

    def discard(self, request: Request) -> bool:
        """A request ends that holds no slot; returns whether it was here."""
        self.sessions.end(request)
        self._promised.pop(request, None)
        if request in self._ready:
            self._ready.remove(request)
            return True
        return self._parked.pop(request, None) is not None

    def restart(self) -> list[Request]:
        """The runners are new: no paused session has anything; who is parked stays so."""
        self.forget()
        return []

    def admitted(self, request: Request) -> None:
        """The request has its pages; what its session has lost is computed again."""
        self._promised.pop(request, None)
        session = self.sessions.turns.get(request)
        if session is not None and session.lost:
            again = min(session.lost, len(request.source.prompt)) - request.cached_tokens
            self._state.counters.session_tokens_again += max(again, 0)
            session.lost = 0

    def left(self, request: Request, slot: int, *, share: bool) -> None:
        """The request has ended; its slot still holds what it computed, for others if ``share``."""
        session, index = self.sessions.end(request), self._tables.index
        if session is None or session.seated is None or not share or index is None:
            return
        count = int(self._tables.published[slot])
        pages = index.find(request.chain.hashes[:count])
        if self.sessions.claim(session, request, pages):
            session.from_files = self._tier.seconds_to_read(pages)

    def forget(self) -> None:
        """The prefix cache is reset: paused sessions have nothing to keep."""
        for session in self.sessions.paused:
            self.sessions.lapse(session)

    def reclaim(self) -> bool:
        """Pages are needed: the paused session of least worth loses its seat, or, where there is
        none, one that waits its claim. Returns whether there was one."""
        now = self._clock()
        if paused := self.sessions.paused:
            self._lapse(min(paused, key=lambda session: self._worth(session, now)), "pages")
            return True
        claims = self._tables.claims
        for session in reversed(self.sessions.seated):
            if claims.count(session):
                self._tables.unclaim(session)
                return True
        return False

    def _look(self) -> None:
        """Gives seats to the first parked requests, as far as there is room or it can be made."""
        now = self._clock()
        self._next_look = now + LOBBY_TICK_SECONDS
        self._follow_held(now)
        while self._parked:
            head = min(self._parked, key=self._order)
            if not (self._has_room(head) or self._makes_room(head, now)):
                return
            session = self.sessions.turns[head]
            self.sessions.seat(session)
            self._promised[head] = self._missing(head)
            self._idle_since = None
            mine = [other for other in self._parked if self.sessions.turns[other] is session]
            for request in mine:
                del self._parked[request]
            self._ready += mine

    def _order(self, request: Request) -> Any:
        rank = self.sessions.turns[request].rank, request.order
        if self._weights is None:
            return rank
        return self._share(request.source.tenant), rank

    def _share(self, tenant: str) -> float:
        """Pages that a tenant holds and claims, by its weight."""
        assert self._weights is not None
        running = [
            other for other in self._state.running.holders() if other.source.tenant == tenant
        ]
        pages = sum(int(self._tables.held[other.slots].sum()) for other in running)
        for session in self.sessions.paused:
            if session.key[0] == tenant:
                pages += self._tables.claims.count(session)
        return pages / self._weights.get(tenant, 1.0)

    def _missing(self, request: Request) -> int:
        """Pages that the request takes of those that are free and without a claim."""
        tables = self._tables
        pages = tables.match(request.chain, request.tokens())
        there = sum(tables.pool.references[page] > 0 or page in tables.claims for page in pages)
        return tables.pages_for(request.num_tokens + 1) - there

    def _has_room(self, request: Request) -> bool:
        free, every = self._tables.num_unclaimed, self._tables.pool.num_pages
        room = free - sum(self._promised.values()) - MARGIN * (every - free)
        return room >= 0 and self._missing(request) <= room

    def _makes_room(self, head: Request, now: float) -> bool:
        """Lets paused sessions lapse whose seats are worth less than they cost."""
        while self._tables.end_pin():
            if self._has_room(head):
                return True
        late = now - self._parked[head] >= PARKED_SECONDS
        idle = self._is_idle(head, now)
        worths = {session: self._worth(session, now) for session in self.sessions.paused}
        for session in sorted(worths, key=lambda other: worths[other]):
            rotates = late and self._has_run(session, now)
            if not (idle or rotates or worths[session] < self._price(session)):
                continue
            self._lapse(session, "price")
            if self._has_room(head):
                return True
        return False

    def _lapse(self, session: Session, reason: str) -> None:
        self._state.counters.session_lapses[reason] += 1
        self.sessions.lapse(session)

    def _worth(self, session: Session, now: float) -> float:
        pages = self._tables.claims.num_alone(session)
        if not pages:  # nothing would be free without it
            return math.inf
        return self._seconds(session, pages) * self.sessions.index(session, now) / pages

    def _seconds(self, session: Session, pages: int) -> float:
        """Seconds until the engine has the last ``pages`` of a session again."""
        if session.from_files is not None:
            return session.from_files
        first = session.tokens - pages * self._tables.page_size
        return self._state.prompt_cost.seconds(max(first, 0), session.tokens)

    def _price(self, session: Session) -> float:
        """What a page of it costs in a second; to read its pages from files makes no other wait."""
        pages = max(self._tables.claims.num_alone(session), 1)
        return 1 / (pages + (self._held if session.from_files is None else 0.0))

    def _has_run(self, session: Session, now: float) -> bool:
        pages = self._tables.claims.num_alone(session)
        assert session.seated is not None
        return now - session.seated >= ROTATION * self._seconds(session, pages)

    def _is_idle(self, head: Request, now: float) -> bool:
        """Whether for as long as the head takes to compute there were only parked requests."""
        if len(self._state.running) or len(self._state.waiting) or len(self._tier) or self._ready:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        return now - self._idle_since >= self._state.prompt_cost.seconds(0, head.num_tokens)

    def _follow_held(self, now: float) -> None:
        """Pages that running requests hold, as a mean over a minute."""
        share = -math.expm1((self._held_at - now) / PAGES_HELD_SECONDS)
        self._held += (self._tables.num_held - self._held) * share
        self._held_at = now


def make_seats(
    config: EngineConfig, state: SchedulerState, tier: PageTier, clock: Callable[[], float]
) -> Seats | None:
    """Seats for sessions; None where pages are not shared, or are not all that a prefix takes."""
    if not config.sessions or state.tables.index is None or config.recurrent:
        return None
    return Seats(state, tier, clock, dict(config.tenant_weights))
