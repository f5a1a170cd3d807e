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
from collections import Counter
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from rayfin.actors.config import EngineConfig
from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import EngineRequest
from rayfin.actors.scheduler.page_tier import PageTier
from rayfin.actors.scheduler.queues.fair_queue import FairQueue
from rayfin.actors.scheduler.queues.ranked_queue import RankedQueue
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import SchedulerState
from rayfin.actors.scheduler.sessions.sessions import Session, SessionTable
from rayfin.actors.timing import (
    LOBBY_TICK_SECONDS,
    PAGES_HELD_SECONDS,
    PARKED_IDLE_SECONDS,
    PARKED_SECONDS,
    RANKED_SECONDS,
)

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
        self._freed = False  # whether a session pauses since the last look
        self._held, self._held_at = 0.0, -math.inf  # mean pages of running requests, and until when
        self._idle_since: float | None = None  # since when none but parked ones are here
        self._ranked: list[tuple[float, Session]] = []  # what _by_worth returns ...
        self._ranked_until = 0.0  # ... on the clock
        state.tables.reclaim = self.reclaim
        state.queue_limits.spares = self.spares

    def __len__(self) -> int:
        return len(self._parked) + len(self._ready)

    def spares(self, source: EngineRequest) -> bool:
        """Whether a request ends the pause of a session with a seat: no full queue refuses it.

        Many requests at once under one name, as of all users of a product, are limited like others.
        """
        session = self.sessions.find(source)
        return session is not None and session.seated is not None and not session.turns

    def keeps(self, request: Request) -> bool:
        """Parks a turn of a session without a seat, unless there is room for it."""
        session = self.sessions.begin(request)
        if session is None:
            return False
        if session.seated is not None:
            if self._is_alone(request):
                self._promised[request] = self._missing(request)
            return False
        self._parked[request] = self._clock()
        if len(self._parked) == 1:  # else it is not the next one
            self._look()
        if request not in self._ready:
            return True
        self._ready.remove(request)
        return False

    @property
    def is_due(self) -> bool:
        """Whether a session pauses since the last look for room, and somebody is parked."""
        return self._freed and bool(self._parked)

    def leaving(self) -> Iterator[tuple[Request, RayfinError | None]]:
        """Yields requests whose sessions have got seats. It looks for room each 50 ms, and when a
        session pauses."""
        if not self._parked and not self._ready:
            return
        if self._freed or self._clock() >= self._next_look:
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
        session = self.sessions.end(request)
        self._freed = self._freed or (session is not None and not session.turns)
        if not share:
            return
        self.sessions.note(request, session)
        if session is None or session.seated is None:
            return
        count = int(self._tables.published[slot])
        claimed, pages = self._tables.find(session, request.chain.hashes[:count])
        if self.sessions.claim(session, request, claimed, pages):
            every = self._tables.claims.pages(session)
            session.from_files = self._tier.seconds_to_read(every)

    def forget(self) -> None:
        """Paused sessions have nothing to keep, as after a reset of the prefix cache."""
        self._freed = True
        for session in self.sessions.paused:
            self.sessions.lapse(session)

    def reclaim(self) -> bool:
        """Pages are needed: the paused session of least worth loses its seat, or, where there is
        none, one that waits its claim. Returns whether there was one."""
        now = self._clock()
        while ranked := self._by_worth(now):
            _, session = ranked.pop()
            if session.seated is not None and not session.turns:  # it still pauses
                self._lapse(session, "pages")
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
        self._next_look, self._freed = now + LOBBY_TICK_SECONDS, False
        self._follow_held(now)
        while self._parked:
            head = self._first()
            if not (
                self._has_room(head) or self._makes_room(head, now) or self._is_overtaken(head)
            ):
                return
            session = self.sessions.turns[head]
            self.sessions.seat(session)
            self._promised[head] = self._missing(head)
            self._idle_since = None
            mine = [other for other in self._parked if self.sessions.turns[other] is session]
            for request in mine:
                del self._parked[request]
            self._ready += mine

    def _first(self) -> Request:
        """The parked request that is next in the policy's order.

        With fair shares it is one of the tenant with the fewest pages held, claimed and promised,
        by its weight.
        """
        turns, weights = self.sessions.turns, self._weights
        if weights is None:
            return min(self._parked, key=lambda request: (turns[request].rank, request.order))
        pages, claims = Counter[str](), self._tables.claims
        for waiting, count in self._promised.items():
            pages[waiting.source.tenant] += count
        for other in self._state.running.holders():
            pages[other.source.tenant] += int(self._tables.held[other.slots].sum())
        for session in self.sessions.paused:
            pages[session.key[0]] += claims.count(session)

        def order(request: Request) -> Any:
            tenant = request.source.tenant
            return pages[tenant] / weights.get(tenant, 1.0), turns[request].rank, request.order

        return min(self._parked, key=order)

    def _missing(self, request: Request) -> int:
        """Pages that the request takes of those that are free and without a claim."""
        tables, references = self._tables, self._tables.pool.references
        hashes = request.chain.hashes[: (request.num_tokens - 1) // tables.page_size]
        claimed, pages = tables.find(self.sessions.turns.get(request), hashes)
        free = [page for page in pages if not references[page]]
        there = claimed + len(pages) - len(free) + len(tables.claims.among(free))
        return tables.pages_for(request.num_tokens + 1) - there

    def _has_room(self, head: Request, *, late: bool = False) -> bool:
        """Whether there are pages for it."""
        return self._excess(head, late=late) <= 0

    def _excess(self, head: Request, *, late: bool = False) -> float:
        """Pages that it takes beyond free ones without a claim, and those of requests that give way
        to it."""
        free, every = self._tables.num_unclaimed, self._tables.pool.num_pages
        free = min(free + self._giving_way(late), every)
        room = free - sum(self._promised.values()) - MARGIN * (every - free)
        return self._missing(head) - room

    def _giving_way(self, late: bool) -> int:
        """Pages of running requests that the queue takes from them, or waits for, as without
        sessions: those in the background, and for who is ``late`` all that have no seat."""
        held, waiting = self._tables.held, self._state.waiting
        pages = int(held[waiting.slots].sum())
        if late:
            others = (other for other in self._state.running.holders() if not self._is_alone(other))
            foreground = [other for other in others if not other.source.background]
            pages += sum(int(held[other.slots].sum()) for other in foreground)
        return pages

    def _is_alone(self, request: Request) -> bool:
        """Whether it is the one turn of its session, which will pause: a seat is for those."""
        session = self.sessions.turns.get(request)
        return session is not None and session.turns == 1

    def _is_overtaken(self, head: Request) -> bool:
        """Whether a later request without a seat waits for pages already, so that no claims are in
        the way: then the head's place is in the queue."""
        first = self._state.waiting.foreground.peek()
        if first is None or first.order < head.order or self._is_alone(first):
            return False
        return self._missing(first) > self._tables.pool.num_free

    def _makes_room(self, head: Request, now: float) -> bool:
        """Lets paused sessions lapse whose seats are worth less than they cost."""
        while self._tables.end_pin():
            if self._has_room(head):
                return True
        late = now - self._parked[head] >= PARKED_SECONDS
        idle = self._seconds_idle(head, now)
        for worth, session in reversed(self._by_worth(now)):
            if session.seated is None or session.turns:  # it does not pause any more
                continue
            rotates = late and self._has_run(session, now)
            spoils = idle >= 0 and idle >= self._spoiled(head, session)
            if not (rotates or spoils or worth < self._price(session)):
                continue
            self._lapse(session, "price")
            if self._has_room(head):
                return True
        return late and self._has_room(head, late=True)

    def _spoiled(self, head: Request, session: Session) -> float:
        """Seconds until the pages are computed again that the head takes from a paused session: no
        longer is the engine idle for its sake."""
        lacks = min(math.ceil(self._excess(head)), self._tables.claims.num_alone(session))
        return min(self._seconds(session, lacks), PARKED_IDLE_SECONDS)

    def _by_worth(self, now: float) -> list[tuple[float, Session]]:
        """The paused sessions, each behind its worth, the one of least worth last.

        The list is kept for a while, so its worths are a little old, some of its sessions do not
        pause any more, and the newest pauses are not in it.
        """
        if now >= self._ranked_until or not self._ranked:
            paused = self.sessions.paused
            worths = [(self._worth(session, now), session) for session in paused]
            self._ranked = sorted(worths, key=itemgetter(0), reverse=True)
            self._ranked_until = now + RANKED_SECONDS * len(paused)
        return self._ranked

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

    def _seconds_idle(self, head: Request, now: float) -> float:
        """Seconds for which there were only parked requests, and some in the background."""
        if self._state.waiting.has_foreground or len(self._tier) or self._ready:
            self._idle_since = None
            return -math.inf
        if self._idle_since is None:
            self._idle_since = now
        return now - max(self._idle_since, self._parked[head])

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
