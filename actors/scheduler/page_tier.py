"""Full pages on a disk (``--kv-disk-path``), at other engines (``--kv-peers``), in host memory.

    a prompt is computed, a request ends:   its full pages ──write──► files; they are lent meanwhile
    a request comes, the runners are new:   files ──read──► pages that are lent, then in the index
    another engine has more of its prompt:  its pages ──read──► the same
    host memory has (host_cache.py):        its pages ──read──► the same

A request whose prompt goes on elsewhere waits beside the queue until it is read, for a limited
time. Then it is like any other: what has arrived is a hit of the prefix index, the rest is
computed. So pages are a cache, and tokens the truth: what is asked for may be missing, broken or
late, and no request fails for it. The engine that has the pages holds nothing for a reader: its
runner serves them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rayfin.actors.config import EngineConfig
from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import (
    HOST,
    EngineRequest,
    Int32Array,
    PagesAt,
    PageTransfer,
    Sampling,
    StopRules,
)
from rayfin.actors.scheduler.beside import Beside
from rayfin.actors.scheduler.executor import Executor, PendingTransfer
from rayfin.actors.scheduler.host_cache import HostCache, make_host_cache
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import SchedulerState
from rayfin.actors.timing import (
    HOST_FIRST_BYTE_SECONDS,
    MAX_PEER_SILENCE_SECONDS,
    PAGE_READ_SECONDS,
    PEER_FIRST_BYTE_SECONDS,
    PEER_READ_SECONDS,
    PEER_SILENCE_SECONDS,
    SLOW_READ_SECONDS,
    SPEED_FADES_SECONDS,
)
from rayfin.cache.page_files import PageFolder
from rayfin.cache.prefix_index import HashChain

FREE_SHARE = 8
"""While requests run, reads leave one page in so many free, or running requests are preempted."""

READ_SHARE = 2
"""At most one page in so many is lent for reading: a disk may hang."""

WRITTEN_SHARE = 4
"""At most one page in so many is lent for writing; the ends of prompts beyond are not stored."""

DISK = ""
"""The source of pages that is no engine."""

LABELS = {DISK: "disk", HOST: "host"}
"""In metrics; of an engine "p2p"."""

ASSUMED_BYTES_PER_SECOND = {"disk": 500e6, "p2p": 1e9, "host": 10e9}
"""Of sources, before anything was read."""

LEAST_MEASURED_BYTES = 16 << 20
"""Smaller reads that are quick say nothing of a source's speed; they are always tried."""


class PageTier(Beside, Protocol):
    """``Lifecycle``'s hook for pages that outlive the runners' memory. It keeps requests beside the
    queue of whose prompts pages are worth reading, until they have come, or come too late."""

    @property
    def is_busy(self) -> bool:
        """Whether pages are on their way, which no request can have meanwhile."""
        ...

    def store_prompt(self, slot: int) -> None:
        """The prompt of the slot's request is computed."""
        ...

    def store(self, slot: int) -> None:
        """The slot's request ends, and its pages are freed right after this call."""
        ...

    def forget(self) -> None:
        """An operator resets the prefix cache."""
        ...

    def seconds_to_read(self, pages: Sequence[int]) -> float | None:
        """Seconds in which files of all ``pages`` of the index are read; None if some have none."""
        ...

    def read_seconds(self, tokens: int) -> dict[str, float]:
        """Seconds to read so many tokens' pages from each engine that was read from, and from
        another one ("")."""
        ...

    def turn(self, digest: str) -> None:
        """The weights are others from now on; their pages have files of their own."""
        ...

    def warm(self, request: Request, arrived: Callable[[int], None]) -> None:
        """Reads pages of a request that runs elsewhere, and no more; without tokens it only meets
        the engine, so that the first read need not wait until both know what their pages are.

        Args:
            arrived: called once, with how many of its first pages are in the index.
        """
        ...


class NoTier:
    """Keeps nothing."""

    is_busy = False

    def __len__(self) -> int:
        return 0

    def keeps(self, request: Request) -> bool:
        return False

    def leaving(self) -> Iterator[tuple[Request, RayfinError | None]]:
        return iter(())

    def discard(self, request: Request) -> bool:
        return False

    def store_prompt(self, slot: int) -> None: ...

    def store(self, slot: int) -> None: ...

    def forget(self) -> None: ...

    def turn(self, digest: str) -> None: ...

    def warm(self, request: Request, arrived: Callable[[int], None]) -> None:
        arrived(0)

    def restart(self) -> list[Request]:
        return []

    def seconds_to_read(self, pages: Sequence[int]) -> float | None:
        return None

    def read_seconds(self, tokens: int) -> dict[str, float]:
        return {}


@dataclass(slots=True)
class _Source:
    """What was seen of a disk or an engine."""

    assumed: float  # seconds a byte
    seconds_per_byte: float  # by the reads so far, later ones more than earlier ones
    measured: float = 0.0  # when
    silence: float = 0.0  # seconds for which it is left alone once it has given nothing ...
    silent_until: float = 0.0  # ... and until when

    def speed(self, now: float) -> float:
        """Bytes a second; what was seen fades, so that a slow engine is tried again."""
        share = math.exp((self.measured - now) / SPEED_FADES_SECONDS)
        return 1 / (self.assumed + share * (self.seconds_per_byte - self.assumed))

    def measure(self, moved: int, seconds: float, now: float) -> None:
        """Notes that so many bytes have come in so many seconds."""
        before = 1 / self.speed(now)
        self.seconds_per_byte = before + (seconds / moved - before) / 4
        self.measured = now


@dataclass(slots=True, eq=False)
class _Transfer:
    """Pages on their way, lent by the page tables meanwhile."""

    pending: PendingTransfer
    what: PageTransfer
    lent: list[int]  # what.pages, behind those that a prefix has already
    begun: float
    keys: tuple[str, ...]  # beside the tokens
    patience: float = PAGE_READ_SECONDS  # that requests have for a read
    valid: bool = True  # False once the cache was reset
    requests: dict[Request, None] = field(default_factory=dict)  # that wait for it
    host: list[int] = field(default_factory=list)  # host pages that it reads ...
    stored: list[int] = field(default_factory=list)  # ... and those that take what ``lent`` held


class SourcesTier:
    """Reads and writes pages of ``folder``, and reads those of engines that requests name, through
    the runners.

    Args:
        peers: whether other engines are asked.
        host: pages in host memory; None: there are none.
        clock: returns seconds.
    """

    least_read_tokens = 32
    """Fewer tokens are computed sooner than a runner answers."""

    least_stored_tokens = 128
    """Shorter requests are not stored: their files would push out those that save more."""

    def __init__(
        self,
        folder: PageFolder | None,
        peers: bool,
        host: HostCache | None,
        page_bytes: int,
        state_bytes: int,
        state: SchedulerState,
        executor: Executor,
        clock: Callable[[], float],
    ) -> None:
        self._base = self._folder = folder
        self._peers, self._host = peers, host
        self._page_bytes, self._state_bytes = page_bytes, state_bytes
        self._tables = state.tables
        self._running = state.running
        self._snapshots = state.snapshots
        self._moves = state.moves
        self._counters = state.counters
        self._cost = state.prompt_cost
        self._executor = executor
        self._clock = clock
        self._reading: list[_Transfer] = []
        self._writing: list[_Transfer] = []
        self._waiting: dict[Request, _Transfer] = {}
        self._warming: dict[Request, Callable[[int], None]] = {}  # those that run elsewhere
        self._since: dict[Request, float] = {}  # when a request that may read more came here
        self._stored: dict[int, bytes] = {}  # page -> the hash under which it has a file, or will
        self._sources: dict[str, _Source] = {}

    def __len__(self) -> int:
        # Another thread may ask before the first read for a request that runs elsewhere has begun.
        return max(len(self._waiting) - len(self._warming), 0)

    @property
    def is_busy(self) -> bool:
        return any(not transfer.pending.done() for transfer in (*self._reading, *self._writing))

    def keeps(self, request: Request) -> bool:
        since = self._since.pop(request, self._clock())
        if request.scoring or request.computes_all or request.ended:
            return False
        hinted = self._host is not None or request.source.pages_at is not None
        if self._folder is None and not hinted and not self._reading:
            return False
        size = self._tables.page_size
        hashes = request.chain.hashes[: (request.num_tokens - 1) // size]
        held = self._held(request)
        missing = hashes[len(held) :]
        if len(missing) * size < self.least_read_tokens:
            return False
        waited = self._clock() - since
        transfer = self._transfer_of(missing[0])
        if transfer is None:
            transfer = self._read(request, held, missing, waited)
        elif waited > transfer.patience:
            return False
        if transfer is None:
            return False
        transfer.requests[request] = None
        self._waiting[request] = transfer
        self._since[request] = since
        return True

    def warm(self, request: Request, arrived: Callable[[int], None]) -> None:
        self._warming[request] = arrived
        if not request.num_tokens and self._peers and (hint := request.source.pages_at) is not None:
            self._tell(source=hint.engine)
        if not self.keeps(request):
            self._warmed(request)

    def _warmed(self, request: Request) -> bool:
        """Says what has arrived, if the request runs elsewhere."""
        arrived = self._warming.pop(request, None)
        if arrived is not None:
            arrived(len(self._held(request)))
        return arrived is not None

    def _held(self, request: Request) -> list[int]:
        """Returns the first pages of a request in the index, up to a state if it needs one."""
        pages = self._tables.match(request.chain, request.tokens())
        if self._snapshots is None:
            return pages
        return pages[: self._snapshots.match(request.chain.hashes[: len(pages)])]

    def _source(self, name: str) -> _Source:
        if name not in self._sources:
            assumed = 1 / ASSUMED_BYTES_PER_SECOND[_label(name)]
            self._sources[name] = _Source(assumed, assumed)
        return self._sources[name]

    def _patience(self, name: str, computing: float) -> float:
        """Seconds that a request waits for a source: of a peer, no longer than computing takes."""
        patience = max(PAGE_READ_SECONDS, computing / 2)
        if name == DISK or not computing:
            return patience
        return min(patience, computing, PEER_READ_SECONDS)

    def _pays(self, name: str, held: int, count: int) -> bool:
        """Whether an engine gives so many pages, behind those that are held, in half of the time in
        which they are computed.

        An engine that has computed nothing yet does not know, and asks.
        """
        size = self._tables.page_size
        computing = self._cost.seconds(held * size, (held + count) * size)
        source = self._source(name)
        if self._clock() < source.silent_until:
            return False
        ahead = sum(len(transfer.what.pages) for transfer in self._reading) + count
        moved = ahead * self._page_bytes + (len(self._reading) + 1) * self._state_bytes
        first = HOST_FIRST_BYTE_SECONDS if name == HOST else PEER_FIRST_BYTE_SECONDS
        reading = first + moved / source.speed(self._clock())
        return not computing or reading <= computing / 2

    def _transfer_of(self, page_hash: bytes) -> _Transfer | None:
        """The transfer that reads a page already; requests with one prompt share it."""
        for transfer in self._reading:
            if transfer.valid and page_hash in transfer.what.hashes:
                return transfer
        return None

    def _read(
        self,
        request: Request,
        held: list[int],
        missing: Sequence[bytes],
        waited: float,
    ) -> _Transfer | None:
        """Begins to read the pages of ``missing`` that a source has, behind those that are held.

        As many as should come before a request has no more patience.
        """
        tables, size = self._tables, self._tables.page_size
        spare = tables.pool.num_pages // FREE_SHARE if len(self._running) or self._reading else 0
        room = tables.num_free_without(held) - spare
        lent = sum(len(transfer.what.pages) for transfer in self._reading)
        limit = min(len(missing), room, tables.pool.num_pages // READ_SHARE - lent)
        # A move that is not sent yet may write to a page that is free by now.
        if limit * size < self.least_read_tokens or len(self._moves):
            return None
        there, hint = self._in_host(request, held, missing), request.source.pages_at
        offers = [(HOST, len(there)), (DISK, len(missing))]
        if self._peers and hint is not None:
            offers.append((hint.engine, hint.pages - len(held)))
        for name, offered in offers:
            offered = max(min(offered, len(missing)), 0)
            computing = self._cost.seconds(len(held) * size, (len(held) + offered) * size)
            patience = self._patience(name, computing)
            speed = self._source(name).speed(self._clock())
            in_time = max(speed * patience - self._state_bytes, LEAST_MEASURED_BYTES)
            wanted = missing[: min(limit, offered, int(in_time / self._page_bytes))]
            count = self._count_at(name, len(held), wanted)
            if waited <= patience and count * size >= self.least_read_tokens:
                host = there[:count] if name == HOST else []
                return self._begin_read(name, request, held, missing[:count], patience, host)
        return None

    def _in_host(self, request: Request, held: list[int], missing: Sequence[bytes]) -> list[int]:
        """Finds the host pages of the first of ``missing``, behind those that are held."""
        if self._host is None:
            return []
        return self._host.match(missing, request.tokens()[len(held) * self._tables.page_size :])

    def _count_at(self, name: str, held: int, wanted: Sequence[bytes]) -> int:
        """How many of the first pages a source may have, if it pays to ask for them."""
        if name != DISK:
            return len(wanted) if self._pays(name, held, len(wanted)) else 0
        return 0 if self._folder is None else self._folder.match(wanted)

    def _begin_read(
        self,
        name: str,
        request: Request,
        held: list[int],
        hashes: Sequence[bytes],
        patience: float,
        host: list[int],
    ) -> _Transfer | None:
        snapshot = None if self._snapshots is None else self._snapshots.lend()
        if snapshot is None and self._snapshots is not None:
            return None
        self._tables.lend(held)
        if self._host is not None:
            self._host.lend(host)
        pages = self._tables.lend_new(len(hashes))
        assert pages is not None, "there was room"
        moves = self._moves.drain()  # of what these pages hold: no step need follow
        stored: list[int] = moves[:, 2].tolist()
        if self._host is not None:
            self._host.lend(stored)
        of_read = {"source": name, "seconds": patience, "snapshot": snapshot}
        moving = moves if len(moves) else None
        transfer = self._send(request, pages, list(hashes), len(held), moves=moving, **of_read)
        transfer.lent, transfer.patience = [*held, *pages], patience
        transfer.host, transfer.stored = host, stored
        self._reading.append(transfer)
        return transfer

    def _send(
        self,
        request: Request,
        pages: list[int],
        hashes: list[bytes],
        first: int,
        **more: Any,
    ) -> _Transfer:
        size = self._tables.page_size
        slot = request.slot
        known = request.tokens() if slot is None else self._running.tokens[slot]
        tokens = known[first * size : (first + len(pages)) * size].reshape(-1, size)
        what = PageTransfer(
            write=more.pop("write", False),
            pages=pages,
            hashes=hashes,
            tokens=np.array(tokens, np.int32),
            before=request.chain.hashes[:first],
            **more,
        )
        pending, keys = self._executor.transfer(what), request.chain.keys
        return _Transfer(pending, what, list(pages), self._clock(), keys)

    def leaving(self) -> Iterator[tuple[Request, RayfinError | None]]:
        if not (self._reading or self._writing):
            return
        for transfer in [transfer for transfer in self._writing if transfer.pending.done()]:
            self._writing.remove(transfer)
            self._end_write(transfer)
        now = self._clock()
        for transfer in list(self._reading):
            done = transfer.pending.done()
            if done:
                self._reading.remove(transfer)
                self._end_read(transfer, now)
            if done or now - transfer.begun > transfer.patience:
                for request in list(transfer.requests):
                    del self._waiting[request], transfer.requests[request]
                    if not (done and self._goes_on(transfer)):
                        self._since[request] = -math.inf  # it reads no more
                    # There may be more to read.
                    if not self.keeps(request) and not self._warmed(request):
                        yield request, None

    def _goes_on(self, transfer: _Transfer) -> bool:
        """Whether there may be more where it came from; an engine says what it has not."""
        arrived, asked = transfer.pending.count(), len(transfer.what.pages)
        return arrived == asked if transfer.what.source != DISK else arrived > 0

    def _end_read(self, transfer: _Transfer, now: float) -> None:
        what, arrived = transfer.what, transfer.pending.count()
        moved, source = arrived * self._page_bytes, self._source(what.source)
        moved += self._state_bytes if arrived else 0
        taken = now - transfer.begun
        if moved and taken > 0 and (moved >= LEAST_MEASURED_BYTES or taken > SLOW_READ_SECONDS):
            source.measure(moved, taken, now)
        if what.source not in LABELS:
            longer = min(max(2 * source.silence, PEER_SILENCE_SECONDS), MAX_PEER_SILENCE_SECONDS)
            source.silence = 0.0 if arrived else longer
            source.silent_until = now + source.silence
        if self._tables.index is not None and transfer.valid:
            parent = what.before[-1] if what.before else None
            for page, page_hash, tokens in zip(
                what.pages[:arrived], what.hashes, what.tokens, strict=False
            ):
                known = self._tables.index.add(page, page_hash, tokens, parent, transfer.keys)
                if known and what.source == DISK:
                    self._stored[page] = page_hash
                parent = page_hash
        fits = arrived > 0 and transfer.valid
        self._end_snapshot(what, what.hashes[arrived - 1] if fits else None)
        counters, source_word = self._counters, _label(what.source)
        result = "late" if now - transfer.begun > transfer.patience else "missing"
        counters.pages_read[source_word, "arrived"] += arrived
        counters.pages_read[source_word, result] += len(what.pages) - arrived
        counters.page_bytes[source_word, "read"] += moved
        counters.page_read_seconds[source_word] += now - transfer.begun
        self._tables.give_back(transfer.lent)
        if self._host is not None:
            lost = [*transfer.host[arrived:], *(() if arrived else transfer.stored)]
            self._host.give_back([*transfer.host, *transfer.stored], lost)

    def _end_snapshot(self, what: PageTransfer, page_hash: bytes | None) -> None:
        if what.snapshot is not None and self._snapshots is not None:
            self._snapshots.give_back(what.snapshot, page_hash)

    def _end_write(self, transfer: _Transfer) -> None:
        what, written = transfer.what, transfer.pending.count()
        if transfer.valid:
            for page in what.pages[written:]:
                del self._stored[page]
        self._counters.disk_pages_written += written
        self._counters.page_bytes["disk", "written"] += written * self._page_bytes
        self._tables.give_back(transfer.lent)

    def discard(self, request: Request) -> bool:
        transfer = self._waiting.pop(request, None)
        self._since.pop(request, None)
        if transfer is not None:
            del transfer.requests[request]
        return transfer is not None

    def store_prompt(self, slot: int) -> None:
        # So a new runner, or an engine that takes the request over, reads it. Where pages are
        # short, lent ones would have more requests preempted.
        tables, source = self._tables, self._running.request(slot).source
        if self._folder is None:
            return
        if source.samples and tables.num_free_without([]) > tables.pool.num_pages // FREE_SHARE:
            self._store(slot)

    def store(self, slot: int) -> None:
        # Without a token since its admission the steps that write its pages may not have run.
        # No step may follow that would bring names.
        if (self._peers or self._host is not None) and len(self._running) == 1:
            if (changes := self._tables.name_changes()) is not None:
                self._tell(named=changes)
        if self._folder is None:
            return
        if self._running.num_known[slot] > self._running.request(slot).num_tokens:
            self._store(slot)

    def _store(self, slot: int) -> None:
        tables, request = self._tables, self._running.request(slot)
        count, index = int(tables.published[slot]), tables.index
        if index is None or count * tables.page_size < self.least_stored_tokens:
            return
        pages, hashes = tables.pages_since(slot, 0)[:count], request.chain.hashes[:count]
        pairs = zip(pages, hashes, strict=True)
        fresh = (
            number
            for number, (page, page_hash) in enumerate(pairs)
            if self._stored.get(page) != page_hash
        )
        first = next(fresh, count)
        # Where another page has the same tokens, that one is in the index and is stored.
        known = [page for page in pages[first:] if page in index]
        if not known or known != pages[first : first + len(known)]:
            return
        lent = sum(len(transfer.lent) for transfer in self._writing)
        known = known[: max(tables.pool.num_pages // WRITTEN_SHARE - lent, 0)]
        if not known:
            return
        tables.lend(known)
        there = hashes[first : first + len(known)]
        self._stored.update(zip(known, there, strict=True))
        self._writing.append(self._send(request, known, there, first, write=True))

    def seconds_to_read(self, pages: Sequence[int]) -> float | None:
        if self._folder is None or not all(page in self._stored for page in pages):
            return None
        return len(pages) * self._page_bytes / self._source(DISK).speed(self._clock())

    def read_seconds(self, tokens: int) -> dict[str, float]:
        if not self._peers:
            return {}
        now, size = self._clock(), tokens / self._tables.page_size * self._page_bytes
        seconds = {"": PEER_FIRST_BYTE_SECONDS + size / ASSUMED_BYTES_PER_SECOND["p2p"]}
        for name, source in list(self._sources.items()):  # this may be another thread
            if name not in LABELS:
                silent = now < source.silent_until
                taken = PEER_FIRST_BYTE_SECONDS + size / source.speed(now)
                seconds[name] = math.inf if silent else taken
        return seconds

    def _tell(self, *, write: bool = False, **what: Any) -> None:
        """Sends a transfer without pages."""
        empty = np.zeros((0, self._tables.page_size), np.int32)
        self._executor.transfer(PageTransfer(write, [], [], empty, [], **what))

    def forget(self) -> None:
        for transfer in (*self._reading, *self._writing):
            transfer.valid = False
        self._stored.clear()
        self._forget_host()
        if self._folder is not None:
            self._tell(write=True, forget=True)

    def _forget_host(self) -> None:
        if self._host is not None:
            self._host.clear()

    def turn(self, digest: str) -> None:
        for transfer in (*self._reading, *self._writing):
            transfer.valid = False
        self._stored.clear()
        self._forget_host()
        self._folder = None if self._base is None else self._base.of(digest)

    def restart(self) -> list[Request]:
        requests = [request for request in self._waiting if request not in self._warming]
        for arrived in self._warming.values():
            arrived(0)
        self._warming.clear()
        for transfer in (*self._reading, *self._writing):
            self._end_snapshot(transfer.what, None)
            self._tables.give_back(transfer.lent)
            if self._host is not None:
                self._host.give_back([*transfer.host, *transfer.stored])
        self._forget_host()
        self._reading.clear()
        self._writing.clear()
        self._waiting.clear()
        self._since.clear()
        self._stored.clear()
        return requests


def request_to_warm(
    tokens: Int32Array, keys: tuple[str, ...], pages_at: PagesAt, page_size: int
) -> Request:
    """A request of which no token is computed; see ``PageTier.warm``.

    Args:
        keys: ``EngineRequest.prefix_keys``.
    """
    chain = HashChain(page_size, keys)
    chain.extend(tokens)
    nothing = StopRules(0, frozenset(), frozenset())
    source = EngineRequest("", tokens, Sampling(), nothing, extra_keys=keys, pages_at=pages_at)
    return Request(source, -1, 0.0, chain)


def make_tier(
    config: EngineConfig,
    state: SchedulerState,
    executor: Executor,
    clock: Callable[[], float],
) -> PageTier:
    """The sources that the engine has for its pages; without any, nothing."""
    host = make_host_cache(state, config.page_bytes)
    if config.page_folder is None and not config.kv_peers and host is None:
        return NoTier()
    sources = (config.page_folder, config.kv_peers, host)
    return SourcesTier(*sources, config.page_bytes, config.state_bytes, state, executor, clock)


def _label(name: str) -> str:
    """What metrics call a source."""
    return LABELS.get(name, "p2p")
