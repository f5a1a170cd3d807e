"""Full pages on a disk, beside those in the runners' memory (``--kv-disk-path``).

    a prompt is computed, a request ends:   its full pages ──write──► files; they are lent meanwhile
    a request comes, the runners are new:   files ──read──► pages that are lent, then in the index

A request whose prompt goes on in files waits beside the queue until they are read, for a limited
time: two seconds, or half of those in which it would be computed. Then it is like any other: what
has arrived is a hit of the prefix index, the rest is computed. So pages are a cache, and tokens the
truth: a file may be missing, broken or late, and no request fails for it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rayfin.actors.config import EngineConfig
from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import PageTransfer
from rayfin.actors.scheduler.beside import Beside
from rayfin.actors.scheduler.executor import Executor, PendingTransfer
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import SchedulerState
from rayfin.actors.timing import PAGE_READ_SECONDS
from rayfin.cache.page_files import PageFolder

FREE_SHARE = 8
"""While requests run, reads leave one page in so many free, or running requests are preempted."""

READ_SHARE = 2
"""At most one page in so many is lent for reading: a disk may hang."""

WRITTEN_SHARE = 4
"""At most one page in so many is lent for writing; the ends of prompts beyond are not stored."""

ASSUMED_BYTES_PER_SECOND = 500e6
LEAST_MEASURED_BYTES = 16 << 20
"""Smaller reads say nothing of a disk's speed, and are always in time."""


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

    def turn(self, digest: str) -> None:
        """The weights are others from now on; their pages have files of their own."""
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

    def restart(self) -> list[Request]:
        return []

    def seconds_to_read(self, pages: Sequence[int]) -> float | None:
        return None


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


class DiskTier:
    """Reads and writes pages of ``folder`` through the runners. ``clock`` returns seconds."""

    least_read_tokens = 32
    """Fewer tokens are computed sooner than a runner answers."""

    least_stored_tokens = 128
    """Shorter requests are not stored: their files would push out those that save more."""

    def __init__(
        self,
        folder: PageFolder,
        page_bytes: int,
        state: SchedulerState,
        executor: Executor,
        clock: Callable[[], float],
    ) -> None:
        self._base = self._folder = folder
        self._page_bytes = page_bytes
        self._tables = state.tables
        self._running = state.running
        self._moves = state.moves
        self._counters = state.counters
        self._cost = state.prompt_cost
        self._executor = executor
        self._clock = clock
        self._reading: list[_Transfer] = []
        self._writing: list[_Transfer] = []
        self._waiting: dict[Request, _Transfer] = {}
        self._since: dict[Request, float] = {}  # when a request that may read more came here
        self._stored: dict[int, bytes] = {}  # page -> the hash under which it has a file, or will
        self._bytes_per_second = ASSUMED_BYTES_PER_SECOND

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return any(not own.pending.done() for own in (*self._reading, *self._writing))

    def keeps(self, request: Request) -> bool:
        since = self._since.pop(request, self._clock())
        if request.scoring or request.computes_all or request.ended:
            return False
        size = self._tables.page_size
        hashes = request.chain.hashes[: (len(request.source.prompt) - 1) // size]
        held = self._tables.match(request.chain, request.source.prompt)
        missing = hashes[len(held) :]
        if len(missing) * size < self.least_read_tokens:
            return False
        computing = self._cost.seconds(len(held) * size, len(hashes) * size)
        patience = max(PAGE_READ_SECONDS, computing / 2)
        if self._clock() - since > patience:
            return False
        transfer = self._transfer_of(missing[0]) or self._read(request, held, missing, patience)
        if transfer is None:
            return False
        transfer.requests[request] = None
        self._waiting[request] = transfer
        self._since[request] = since
        return True

    def _transfer_of(self, page_hash: bytes) -> _Transfer | None:
        """The transfer that reads a page already; requests with one prompt share it."""
        for transfer in self._reading:
            if transfer.valid and page_hash in transfer.what.hashes:
                return transfer
        return None

    def _read(
        self, request: Request, held: list[int], missing: Sequence[bytes], patience: float
    ) -> _Transfer | None:
        """Begins to read the pages of ``missing`` that have files, behind those that are held.

        As many as should come within ``patience`` seconds.
        """
        tables, size = self._tables, self._tables.page_size
        spare = tables.pool.num_pages // FREE_SHARE if len(self._running) or self._reading else 0
        room = tables.num_free_without(held) - spare
        in_time = max(self._bytes_per_second * patience, LEAST_MEASURED_BYTES)
        lent = sum(len(own.what.pages) for own in self._reading)
        most = min(len(missing), room, tables.pool.num_pages // READ_SHARE - lent)
        most = min(most, int(in_time / self._page_bytes))
        # A move that is not sent yet may write to a page that is free by now.
        if most * size < self.least_read_tokens or len(self._moves):
            return None
        count = self._folder.match(missing[:most])
        if count * size < self.least_read_tokens:
            return None
        tables.lend(held)
        pages = tables.lend_new(count)
        assert pages is not None, "there was room"
        transfer = self._send(request, pages, list(missing[:count]), len(held), write=False)
        transfer.lent, transfer.patience = [*held, *pages], patience
        self._reading.append(transfer)
        return transfer

    def _send(
        self,
        request: Request,
        pages: list[int],
        hashes: list[bytes],
        first: int,
        *,
        write: bool,
    ) -> _Transfer:
        size = self._tables.page_size
        slot = request.slot
        known = request.source.prompt if slot is None else self._running.tokens[slot]
        tokens = known[first * size : (first + len(pages)) * size].reshape(-1, size)
        what = PageTransfer(
            write=write,
            pages=pages,
            hashes=hashes,
            tokens=np.array(tokens, np.int32),
            before=request.chain.hashes[:first],
        )
        pending, keys = self._executor.transfer(what), request.chain.keys
        return _Transfer(pending, what, list(pages), self._clock(), keys)

    def leaving(self) -> Iterator[tuple[Request, RayfinError | None]]:
        if not (self._reading or self._writing):
            return
        for transfer in [own for own in self._writing if own.pending.done()]:
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
                    if not (done and transfer.pending.count()):
                        self._since[request] = -math.inf  # it reads no more
                    if not self.keeps(request):  # there may be more to read
                        yield request, None

    def _end_read(self, transfer: _Transfer, now: float) -> None:
        what, arrived = transfer.what, transfer.pending.count()
        moved = arrived * self._page_bytes
        if moved >= LEAST_MEASURED_BYTES and now > transfer.begun:
            speed = moved / (now - transfer.begun)
            self._bytes_per_second += (speed - self._bytes_per_second) / 4
        if self._tables.index is not None and transfer.valid:
            parent = what.before[-1] if what.before else None
            for page, page_hash, tokens in zip(
                what.pages[:arrived], what.hashes, what.tokens, strict=False
            ):
                if self._tables.index.add(page, page_hash, tokens, parent, transfer.keys):
                    self._stored[page] = page_hash
                parent = page_hash
        self._counters.disk_pages_read += arrived
        self._counters.disk_pages_unreadable += len(what.pages) - arrived
        self._tables.give_back(transfer.lent)

    def _end_write(self, transfer: _Transfer) -> None:
        what, written = transfer.what, transfer.pending.count()
        if transfer.valid:
            for page in what.pages[written:]:
                del self._stored[page]
        self._counters.disk_pages_written += written
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
        if source.samples and tables.num_free_without([]) > tables.pool.num_pages // FREE_SHARE:
            self._store(slot)

    def store(self, slot: int) -> None:
        # Without a token since its admission the steps that write its pages may not have run.
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
        lent = sum(len(own.lent) for own in self._writing)
        known = known[: max(tables.pool.num_pages // WRITTEN_SHARE - lent, 0)]
        if not known:
            return
        tables.lend(known)
        there = hashes[first : first + len(known)]
        self._stored.update(zip(known, there, strict=True))
        self._writing.append(self._send(request, known, there, first, write=True))

    def seconds_to_read(self, pages: Sequence[int]) -> float | None:
        if not all(page in self._stored for page in pages):
            return None
        return len(pages) * self._page_bytes / self._bytes_per_second

    def forget(self) -> None:
        for transfer in (*self._reading, *self._writing):
            transfer.valid = False
        self._stored.clear()
        empty = np.zeros((0, self._tables.page_size), np.int32)
        self._executor.transfer(PageTransfer(True, [], [], empty, [], forget=True))

    def turn(self, digest: str) -> None:
        for transfer in (*self._reading, *self._writing):
            transfer.valid = False
        self._stored.clear()
        self._folder = self._base.of(digest)

    def restart(self) -> list[Request]:
        requests = list(self._waiting)
        for transfer in (*self._reading, *self._writing):
            self._tables.give_back(transfer.lent)
        self._reading.clear()
        self._writing.clear()
        self._waiting.clear()
        self._since.clear()
        self._stored.clear()
        return requests


def make_tier(
    config: EngineConfig,
    state: SchedulerState,
    executor: Executor,
    clock: Callable[[], float],
) -> PageTier:
    """The disk where the engine has one for its pages, else nothing."""
    if config.page_folder is None:
        return NoTier()
    return DiskTier(config.page_folder, config.page_bytes, state, executor, clock)
