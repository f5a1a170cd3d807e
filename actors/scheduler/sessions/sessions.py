"""Sessions of agents: turns, the pauses between them, and the pages that they want again."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfin.actors.messages import EngineRequest, Int32Array
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.sessions.pause_law import PauseLaw
from rayfin.actors.timing import FORGOTTEN_SESSION_SECONDS
from rayfin.cache.page_tables import PageTables

MOST_SESSIONS = 16_384
NAMELESS_PAGES = 64
"""A conversation without a name has a prompt of at least so many full pages, or of a sixteenth of
all pages: shorter ones are computed again in no time."""

OPENING_TOKENS = 8
"""Of a prompt's end, as a template opens an answer, that may be missing where it comes back."""


@dataclass(slots=True, eq=False)
class Session:
    """One session that this engine knows, and whether it has a *seat*: its pages are claimed."""

    key: tuple[str, str | bytes]  # tenant, and name or hash of a page
    digest: bytes  # of the name; empty without one
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
    has_returned: bool = True  # false after a first turn without a name
    length: int = 0  # of its last prompt, where it has no name ...
    tail: Int32Array | None = None  # ... and the tokens of that after the page of its key
    rank: Any = None  # of its last turn, in the order of the policy


def is_turn(source: EngineRequest) -> bool:
    """Whether a request is a turn of a session, and not a probe beside it or work that may wait."""
    return source.session is not None and not source.session.aside and _is_chat(source)


def _is_chat(source: EngineRequest) -> bool:
    return (
        not source.background
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
        # of sessions, of those whose children run, of conversations without a name
        self.laws = (PauseLaw(), PauseLaw(), PauseLaw())
        self.turns: dict[Request, Session] = {}
        self._known: OrderedDict[tuple[str, str | bytes], Session] = OrderedDict()  # last used last
        self._seated: dict[Session, None] = {}
        self._tables = tables
        self._nameless_pages = max(1, min(NAMELESS_PAGES, tables.pool.num_pages // 16))
        self._clock = clock
        self._rank = rank

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_seated(self) -> int:
        """Sessions with seats; for any thread."""
        return len(self._seated)

    def digests(self) -> frozenset[bytes]:
        """Those of the named sessions with seats; for any thread."""
        return frozenset(session.digest for session in list(self._seated) if session.digest)

    @property
    def seated(self) -> list[Session]:
        """The sessions with seats, in the order in which they got them."""
        return list(self._seated)

    @property
    def paused(self) -> list[Session]:
        """Those of them that pause."""
        return [session for session in self._seated if not session.turns]

    def find(self, source: EngineRequest) -> Session | None:
        """The session that a request to come names, if it is known."""
        if source.session is None or not is_turn(source):
            return None
        return self._known.get((source.tenant, source.session.name))

    def begin(self, request: Request) -> Session | None:
        """A turn has come: the session's pause is over. None if it is a turn of no known one."""
        source, now = request.source, self._clock()
        reference = source.session
        session = self._named(source, now) if is_turn(source) else self._nameless(request)
        if session is None:
            return None
        if reference is not None and reference.parent and session.parent is None:
            parent = self._known.get((source.tenant, reference.parent))
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
        session.has_children, session.has_returned = False, True
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

    def note(self, request: Request, session: Session | None) -> None:
        """A chat has left its pages: without a name it is known by its prompt, with which the next
        turn begins. Answers may come back without what the model has thought.

        The first turn makes no session that wants something, since most prompts never come back.

        Args:
            session: that the request has gone on from, if any.
        """
        source, size = request.source, self._tables.page_size
        length = len(source.prompt)
        pages = (length - OPENING_TOKENS) // size
        if source.session is not None or not _is_chat(source) or pages < self._nameless_pages:
            return
        key = source.tenant, request.chain.hashes[pages - 1]
        before = self._known.pop(key, None)
        if session is None:
            if before is not None and (before.turns or before.has_returned):
                self._known[key] = before  # another choice of its prompt, or a chat like it
                return
            session = before or Session(key, b"", paused=self._clock(), has_returned=False)
        elif before is not session:
            if before is not None:
                self.forget(before)
            if self._known.get(session.key) is session:
                del self._known[session.key]
        session.key, session.length = key, length
        session.tail = source.prompt[pages * size : length - OPENING_TOKENS].copy()
        self._known[key] = session
        self._forget_old(self._clock())

    def claim(self, session: Session, request: Request, claimed: int, pages: Sequence[int]) -> bool:
        """A turn has left ``claimed`` pages, which are the session's claim, and ``pages`` behind
        them: it claims these too; or other ``pages``, if they go on from what it has.

        A title or a probe takes no context away: only the second turn in a row that does not go on,
        as after a compaction, drops the claim before it.

        Returns:
            Whether it claims them.
        """
        if claimed:
            self._tables.extend_claim(session, pages)
        else:
            before, reference = self._tables.claims.pages(session), request.source.session
            fresh = reference is not None and reference.fresh
            # Templates leave out what a model has thought, so the end of an answer may not come
            # back.
            half = -(-len(before) // 2)
            if before[:half] != pages[:half] and not fresh and not session.strays:
                session.strays += 1
                return False
            self._tables.claim(session, pages)
        session.strays = 0
        session.tokens = (claimed + len(pages)) * self._tables.page_size
        session.from_files = None
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
        return self._law(session).index(age)

    def _named(self, source: EngineRequest, now: float) -> Session:
        reference = source.session
        assert reference is not None
        key = source.tenant, reference.name
        session = self._known.get(key)
        if session is None:
            session = self._known[key] = Session(key, reference.digest(source.tenant))
            self._forget_old(now)
        self._known.move_to_end(key)
        return session

    def _nameless(self, request: Request) -> Session | None:
        """The paused conversation without a name that the request goes on from, or None."""
        source, size = request.source, self._tables.page_size
        if source.session is not None or not _is_chat(source):
            return None
        prompt = source.prompt
        for pages in range(len(prompt) // size, self._nameless_pages - 1, -1):
            session = self._known.get((source.tenant, request.chain.hashes[pages - 1]))
            if session is None or session.tail is None or len(prompt) <= session.length:
                continue
            if np.array_equal(prompt[pages * size :][: len(session.tail)], session.tail):
                self._known.move_to_end(session.key)
                return None if session.turns else session
        return None

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
        if not session.has_returned:
            return
        age = now - session.paused
        self._law(session).observe(session.counted, age, returned=returned)
        session.counted = age

    def _law(self, session: Session) -> PauseLaw:
        return self.laws[session.has_children if session.digest else 2]


def _is_above(session: Session, parent: Session | None) -> bool:
    """Whether a session is its parent, or above it: then they form no tree."""
    while parent is not None:
        if parent is session:
            return True
        parent = parent.parent
    return False
