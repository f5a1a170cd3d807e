"""Pages that one runner reads from another, of an engine with the same model.

    reader ── greeting (32 bytes) ──────────► source   a digest of all that decides a page's bits
    reader ◄─ yes or no (1 byte) ─────────── source
    reader ── kind, count, hashes of pages ─► source   again and again, or it ends in a minute
    reader ◄─ record, record, ... or none ── source    up to the first that it does not have
    reader ◄─ number, record, or zero ────── source    or the last state behind one of the pages

The source holds nothing for a reader: a thread of its own copies one page at a time, and looks
before and after whether the page has the name that was asked for. So neither its scheduler nor a
step has a part in it. A reader that gives up closes the connection, so nothing comes late. Without
the hash of all tokens of a prompt, with its salt and its adapter, its pages cannot be asked for.
"""

import hmac
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np

from rayfin.actors import failpoints
from rayfin.actors.messages import Int32Array, PageTransfer
from rayfin.actors.processes.environment import lower_priority
from rayfin.actors.runner.page_names import PageNames
from rayfin.actors.runner.pages.records import Bytes, head_bytes, head_of, why_wrong
from rayfin.actors.runner.pages.transfers import PageTransfers
from rayfin.actors.timing import (
    PAGE_READ_SECONDS,
    PEER_BARRED_SECONDS,
    PEER_REST_SECONDS,
    WRONG_PAGES_SECONDS,
)
from rayfin.actors.transport.channel import Acceptor, connect

logger = logging.getLogger(__name__)

QUESTION = Struct("<BI")  # for what, and how many hashes follow
PAGES, STATE = 0, 1
NUMBER = Struct("<I")
HASH_BYTES = 32
MOST_HASHES = 4096
"""Of one question; what is longer is read in several."""

MOST_READERS = 16
"""Connections to one runner; others are refused."""

MOST_WRONG = 3
"""Wrong pages within a minute, for which an engine is not read from for a while."""

YES, NO = b"\1", b"\0"
MISSING = bytes(16)
"""In place of a record's header."""


class Peers:
    """Reads pages of other engines' runners. A ``PageSource``.

    Args:
        ask: returns an address of the runner of an engine, empty if it has none; see
            ``PageServer.address``.
        greeting: what this runner's pages depend on.
    """

    def __init__(self, ask: Callable[[str], str], greeting: Callable[[], bytes]) -> None:
        self._ask = ask
        self._greeting = greeting
        # Connections at rest, by engine, with what was said there: other weights have other pages.
        self._open: dict[str, tuple[bytes, socket.socket]] = {}
        self._wrong: dict[str, deque[float]] = {}  # by engine: when its last pages were wrong

    def records(self, what: PageTransfer, into: Bytes) -> Iterator[None]:
        with self._asking(what) as link:
            for number, tokens in enumerate(what.tokens if link is not None else ()):
                assert link is not None
                if not link.owed:
                    link.ask(PAGES, what.hashes[number : number + MOST_HASHES])
                if not link.record(tokens, into):
                    return
                yield

    def state(self, what: PageTransfer, into: Bytes) -> int:
        with self._asking(what) as link:
            if link is not None:
                link.ask(STATE, what.hashes[:MOST_HASHES])
                number = bytearray(NUMBER.size)
                link.receive(memoryview(number))
                (count,) = NUMBER.unpack(number)
                link.owed = int(count > 0)
                if 0 < count <= len(what.hashes) and link.record(what.tokens[count - 1], into):
                    return int(count)
        return 0

    @contextmanager
    def _asking(self, what: PageTransfer) -> Iterator["_Link | None"]:
        """A connection to the source of ``what``, for a while; None if there is none."""
        link = None if self._is_barred(what.source) else self._link(what)
        try:
            yield link
        except ValueError as error:
            logger.warning("a page of %s is computed: %s", what.source, error)
            wrong = self._wrong.setdefault(what.source, deque(maxlen=MOST_WRONG))
            wrong.append(time.monotonic())
        except OSError as error:
            logger.debug("%s is read from no further: %s", what.source, error)
        finally:
            if link is not None:
                rests = link.greeting, link.connected
                if link.owed or self._open.setdefault(what.source, rests) is not rests:
                    link.connected.close()

    def _link(self, what: PageTransfer) -> "_Link | None":
        greeting = self._greeting()  # the first time it takes as long as to read a model
        until = time.monotonic() + what.seconds
        try:
            connected = self._at_rest(what.source, greeting)
            connected = connected or self._connect(what.source, greeting, until)
        except OSError as error:  # and TimeoutError is one
            logger.debug("%s is not read from: %s", what.source, error)
            return None
        return _Link(connected, greeting, until)

    def _at_rest(self, source: str, greeting: bytes) -> socket.socket | None:
        """Takes the connection that is open to an engine, if it is of use still."""
        said, connected = self._open.pop(source, (b"", None))
        if connected is None:
            return None
        if said == greeting and not _has_come(connected, 0.0):
            return connected
        connected.close()  # the weights are others, or the other end has closed
        return None

    def _is_barred(self, source: str) -> bool:
        wrong = self._wrong.get(source)
        if wrong is None or len(wrong) < MOST_WRONG or wrong[-1] - wrong[0] > WRONG_PAGES_SECONDS:
            return False
        return time.monotonic() - wrong[-1] < PEER_BARRED_SECONDS

    def _connect(self, source: str, greeting: bytes, until: float) -> socket.socket:
        """A connection to the runner of an engine.

        Raises:
            OSError: it does not listen here, or has other pages.
        """
        address = self._ask(source)
        if not address:
            raise ConnectionRefusedError(f"{source} does not listen")
        connected = connect(address)
        try:
            connected.setblocking(True)
            _send(connected, greeting, until)
            answer = bytearray(len(YES))
            _receive(connected, memoryview(answer), until)
            if answer != YES:
                raise ConnectionRefusedError(f"{source} has pages of another kind")
        except OSError:
            connected.close()
            raise
        return connected


@dataclass(slots=True)
class _Link:
    """A connection of a reader, with what is still to come by it."""

    connected: socket.socket
    greeting: bytes
    until: float  # when the reader has no more patience
    owed: int = 0  # records that were asked for, and have not come

    def ask(self, kind: int, hashes: Sequence[bytes]) -> None:
        """Asks for records of pages, or for one of a state."""
        self.owed = len(hashes)
        _send(self.connected, QUESTION.pack(kind, len(hashes)) + b"".join(hashes), self.until)

    def receive(self, into: memoryview) -> None:
        """Fills ``into``."""
        _receive(self.connected, into, self.until)

    def record(self, tokens: Int32Array, into: Bytes) -> bool:
        """Reads the next record; False if the source says that it is missing.

        Raises:
            ValueError: it is not one with ``tokens``.
        """
        head = bytearray(head_bytes(tokens))
        self.receive(memoryview(head)[: len(MISSING)])
        if head[: len(MISSING)] == MISSING:
            self.owed = 0
            return False
        self.receive(memoryview(head)[len(MISSING) :])
        self.receive(into.data)
        if (why := why_wrong(head, into, tokens)) is not None:
            raise ValueError(why)
        self.owed -= 1
        return True


class PageServer:
    """Serves the pages of one runner, from a thread for each reader.

    Args:
        greeting: what this runner's pages depend on; a reader has to say the same.
    """

    def __init__(
        self,
        names: PageNames,
        transfers: Callable[[], PageTransfers | None],
        greeting: Callable[[], bytes],
    ) -> None:
        self._names = names
        self._transfers = transfers
        self._greeting = greeting
        self._readers = threading.BoundedSemaphore(MOST_READERS)
        self._acceptor = Acceptor(self._serve, "pages")

    def address(self, host: str = "", port: int = 0) -> str:
        """Where one reader connects to, once; empty where there are no such sockets.

        Args:
            host, port: of this machine, for a reader on another one.

        Raises:
            OSError: it cannot listen there.
        """
        return self._acceptor.address_on(host, port) if host else self._acceptor.address()

    def _serve(self, connected: socket.socket) -> None:
        lower_priority()  # of this thread, behind the steps
        said = bytearray(HASH_BYTES)
        try:
            _receive(connected, memoryview(said), time.monotonic() + PAGE_READ_SECONDS)
            same = hmac.compare_digest(said, self._greeting())
            if not same or not self._readers.acquire(blocking=False):
                connected.sendall(NO)
                return
            try:
                connected.sendall(YES)
                while self._answer(connected, bytes(said)):
                    pass
            finally:
                self._readers.release()
        except OSError as error:
            logger.debug("a reader of pages has gone: %s", error)

    def _answer(self, connected: socket.socket, greeting: bytes) -> bool:
        """Answers one question; False if none comes, or if the pages are of other weights now."""
        question = bytearray(QUESTION.size)
        if not _has_come(connected, PEER_REST_SECONDS):
            return False
        _receive(connected, memoryview(question), time.monotonic() + PAGE_READ_SECONDS)
        kind, count = QUESTION.unpack(question)
        if kind not in (PAGES, STATE) or count > MOST_HASHES:
            return False
        data = bytearray(count * HASH_BYTES)
        _receive(connected, memoryview(data), time.monotonic() + PAGE_READ_SECONDS)
        hashes = [bytes(data[at : at + HASH_BYTES]) for at in range(0, len(data), HASH_BYTES)]
        for answer in self._records(hashes) if kind == PAGES else self._state(hashes):
            if greeting != self._greeting():
                return False
            connected.settimeout(PAGE_READ_SECONDS)  # a reader that reads no more
            for part in _planted(answer) if failpoints.ACTIVE else answer:
                connected.sendall(part)
        return True

    def _records(self, hashes: Sequence[bytes]) -> Iterator[Sequence[Any]]:
        """Pages, up to the first that is not here."""
        for page_hash in hashes:
            if (record := self._record(page_hash)) is None:
                yield (MISSING,)
                return
            yield record

    def _state(self, hashes: Sequence[bytes]) -> Iterator[Sequence[Any]]:
        """The last state behind one of the pages, and which."""
        transfers = self._transfers()
        for number in range(len(hashes), 0, -1) if transfers is not None else ():
            assert transfers is not None
            page, content = self._names.find(hashes[number - 1]), None
            if page is not None:
                content = transfers.state(hashes[number - 1])
            if page is not None and content is not None:
                tokens: Int32Array = np.frombuffer(page[1].tokens, np.int32)
                yield NUMBER.pack(number), head_of(tokens, content), content.data
                return
        yield (NUMBER.pack(0),)

    def _record(self, page_hash: bytes) -> Sequence[Any] | None:
        entry, transfers = self._names.find(page_hash), self._transfers()
        if entry is None or transfers is None:
            return None
        page, name = entry
        content = transfers.content(page)
        if content is None or self._names.find(page_hash) is not entry:
            return None
        tokens: Int32Array = np.frombuffer(name[1], np.int32)
        return head_of(tokens, content), content.data


def _planted(answer: Sequence[Any]) -> Iterator[Any]:
    """The parts of an answer, of which failpoints tear a record, or flip one of its bits.

    Raises:
        ConnectionAbortedError: it is torn.
    """
    fault = None
    if failpoints.ACTIVE and len(answer) > 1:
        fault = failpoints.ACTIVE.hit("runner.record")
    yield from answer[:-1]
    content = answer[-1]
    if fault == "drop":
        yield content[: len(content) // 2]
        raise ConnectionAbortedError("planted")
    yield bytes([content[0] ^ 1, *content[1:]]) if fault == "flip" else content


def _send(connected: socket.socket, data: bytes, until: float) -> None:
    connected.settimeout(_patience(until))
    connected.sendall(data)


def _has_come(connected: socket.socket, seconds: float) -> bool:
    """Whether there is something to read within so many seconds, or the end."""
    ready = select.poll()
    ready.register(connected, select.POLLIN)
    return bool(ready.poll(1000 * seconds))


def _receive(connected: socket.socket, into: memoryview, until: float) -> None:
    """Fills ``into``.

    Raises:
        OSError: the other end has closed, or is too slow.
    """
    at = 0
    while at < len(into):
        connected.settimeout(_patience(until))
        if not (count := connected.recv_into(into[at:])):
            raise ConnectionResetError("the other end has closed")
        at += count


def _patience(until: float) -> float:
    """Seconds to wait for the next bytes.

    Raises:
        TimeoutError: the time is over.
    """
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("too slow")
    return min(left, PAGE_READ_SECONDS)
