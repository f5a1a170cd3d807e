"""Sessions of agents: turns, the pauses between them, and the pages that they want again."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rayfin.actors.messages import EngineRequest
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.sessions.pause_law import PauseLaw
from rayfin.actors.timing import FORGOTTEN_SESSION_SECONDS
from rayfin.cache.page_tables import PageTables

MOST_SESSIONS = 16_384


@dataclass(slots=True, eq=False)
class Session:
    """One session that this engine knows, and whether it has a *seat*: its pages are claimed."""

    key: tuple[str, str]  # tenant and name
    digest: bytes
    parent: "Session | None" = None
    seated: float | None = None  # since when it has a seat
    turns: int = 0  # requests of it that are here
    paused: float | None = None  # since when there is none
    counted: float = 0.0  # seconds of the pause that the law knows of
    tokens: int = 0  # of its claim
    lost: int = 0  # tokens of a claim that has ended, until its next turn is admitted
    from_files: float | None = None  # seconds to read its claim, where all of it has files
    strays: int = 0  # turns in a row that did not go on from its claim
    has_children: bool = False  # that have asked since its last turn
    rank: Any = None  # of its last turn, in the order of the policy


def is_turn(source: EngineRequest) -> bool:
    """Whether a request is a turn of a session, and not a probe beside it or work that may wait."""
    return (
        source.session is not None
        and not source.session.aside
        and not source.background
        and source.samples
        and source.beams is None
        and source.sampling.prompt_logprobs is None
    )


class SessionTable:
    """All sessions that this engine knows, the last used ones; and the laws of their pauses.

    Args:
        rank: the place of a request in the order of the policy.
    """

    def __init__(
        self, tables: PageTables, clock: Callable[[], float], rank: Callable[[Request], Any]
    ) -> None:
        self.laws = (PauseLaw(), PauseLaw())  # of sessions, and of those whose children run
        self.turns: dict[Request, Session] = {}
        self._known: OrderedDict[tuple[str, str], Session] = OrderedDict()  # the last used last
        self._seated: dict[Session, None] = {}
        self._tables = tables
        self._clock = clock
        self._rank = rank

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_seated(self) -> int:
        """Sessions with seats; for any thread."""
        return len(self._seated)

    def digests(self) -> frozenset[bytes]:
        """Those of the sessions with seats; for any thread."""
        return frozenset(session.digest for session in list(self._seated))

    @property
    def seated(self) -> list[Session]:
        """The sessions with seats, in the order in which they got them."""
        return list(self._seated)

    @property
    def paused(self) -> list[Session]:
        """Those of them that pause."""
        return [session for session in self._seated if not session.turns]

    def find(self, source: EngineRequest) -> Session | None:
        """The session of a request to come, if it is known."""
        return self._known.get(_key(source)) if is_turn(source) else None

    def begin(self, request: Request) -> Session:
        """A turn has come: the session's pause is over."""
        source, now = request.source, self._clock()
        session = self._session(source, now)
        assert source.session is not None
        if source.session.parent and session.parent is None:
            parent = self._known.get((source.tenant, source.session.parent))
            session.parent = (
                parent if parent is not None and not _is_above(session, parent) else None
            )
        rank = self._rank(request)
        session.rank = min(rank, session.rank) if session.turns else rank
        if session.parent is not None:
            session.parent.has_children = True
            if session.parent.rank is not None:  # a child takes its parent's place
                session.rank = min(session.rank, session.parent.rank)
        if session.paused is not None:
            self._count(session, now, returned=True)
            session.paused = None
        session.has_children = False
        session.turns += 1
        self.turns[request] = session
        return session

    def end(self, request: Request) -> Session | None:
        """A turn has ended, however it did; returns its session. Others are ignored."""
        session = self.turns.pop(request, None)
        if session is None:
            return None
        session.turns -= 1
        if not session.turns:
            session.paused, session.counted = self._clock(), 0.0
            reference = request.source.session
            if reference is not None and reference.final:
                self.forget(session)
        return session

    def claim(self, session: Session, request: Request, pages: Sequence[int]) -> bool:
        """A turn has left ``pages``: the session claims them if they go on from what it has.

        A title or a probe takes no context away: only the second turn in a row that does not go on,
        as after a compaction, drops the claim before it.

        Returns:
            Whether it claims them.
        """
        before, reference = self._tables.claims.pages(session), request.source.session
        shared = next(
            (
                place
                for place, (old, new) in enumerate(zip(before, pages, strict=False))
                if old != new
            ),
            min(len(before), len(pages)),
        )
        fresh = reference is not None and reference.fresh
        # Templates leave out what a model has thought, so the end of an answer may not come back.
        if 2 * shared < len(before) and not fresh and not session.strays:
            session.strays += 1
            return False
        session.strays = 0
        session.tokens = len(pages) * self._tables.page_size
        session.from_files = None
        self._tables.claim(session, pages)
        return True

    def seat(self, session: Session) -> None:
        """The session has a seat from now on."""
        session.seated = self._clock()
        self._seated[session] = None

    def lapse(self, session: Session) -> None:
        """The session loses its seat and its claim; its next turn waits for another."""
        if session.paused is not None:
            self._count(session, self._clock(), returned=False)
        session.seated, session.lost = None, session.tokens
        self._seated.pop(session, None)
        self._tables.unclaim(session)

    def forget(self, session: Session) -> None:
        """The session is over."""
        session.seated = session.parent = None
        self._seated.pop(session, None)
        self._tables.unclaim(session)
        self._known.pop(session.key, None)

    def index(self, session: Session, now: float) -> float:
        """Returns a second, at best, of a session that pauses."""
        age = 0.0 if session.paused is None else now - session.paused
        return self.laws[session.has_children].index(age)

    def _session(self, source: EngineRequest, now: float) -> Session:
        key, reference = _key(source), source.session
        session = self._known.get(key)
        if session is None:
            assert reference is not None
            session = self._known[key] = Session(key, reference.digest(source.tenant))
            self._forget_old(now)
        self._known.move_to_end(key)
        return session

    def _forget_old(self, now: float) -> None:
        """Drops the sessions that have paused for long; if there are too many, the longest."""
        over = len(self._known) - MOST_SESSIONS
        old: list[Session] = []
        for session in self._known.values():
            late = session.paused is not None and now - session.paused > FORGOTTEN_SESSION_SECONDS
            if not late and len(old) >= over:
                break
            if not session.turns and session.paused is not None:
                old.append(session)
        for session in old:
            self._count(session, now, returned=False)
            self.forget(session)

    def _count(self, session: Session, now: float, *, returned: bool) -> None:
        assert session.paused is not None
        age = now - session.paused
        self.laws[session.has_children].observe(session.counted, age, returned=returned)
        session.counted = age


def _key(source: EngineRequest) -> tuple[str, str]:
    return source.tenant, "" if source.session is None else source.session.name


def _is_above(session: Session, parent: Session | None) -> bool:
    """Whether a session is its parent, or above it: then they form no tree."""
    while parent is not None:
        if parent is session:
            return True
        parent = parent.parent
    return False
