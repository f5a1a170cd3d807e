"""Moves pages of the cache from and to where else they are, on threads beside the steps."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rayfin.actors.messages import HOST, SWAP_IN, Int32Array, PageTransfer
from rayfin.actors.runner.page_moves import PageMover
from rayfin.actors.runner.page_names import PageNames
from rayfin.actors.runner.pages.disk import DiskPages
from rayfin.actors.runner.pages.records import Bytes, PageSource, RowBytes, state_name
from rayfin.actors.runner.state_tensors import StateTensors
from rayfin.actors.timing import PAGE_READ_SECONDS, PAGE_TURN_SECONDS
from rayfin.cache.kv_tensors import KVTensors
from rayfin.cache.page_files import PageFolder


class HostPages:
    """One rank's pages in host memory, read and written on a thread beside the steps.

    Most are written by moves of steps. They come back all at once, straight to where they belong:
    a copy for each page and layer would take as long as computing. What a host page holds is known
    by the name that it took along, so nothing is summed.
    """

    def __init__(self, mover: PageMover, names: PageNames) -> None:
        self._mover = mover.beside()
        self._names = names

    def store(self, moves: Int32Array) -> None:
        """Makes the moves [M, 3] of pages that are about to be written over."""
        leaving = self._names.moving(moves)
        self._mover.run_beside(moves)
        self._names.moved(leaving)

    def read(self, what: PageTransfer) -> int:
        """Copies the first pages of ``what`` into the cache; returns how many hold them now."""
        entries = []
        for page_hash, tokens in zip(what.hashes, what.tokens, strict=True):
            entry = self._names.find_in_host(page_hash)
            if entry is None or entry[1].tokens != tokens.tobytes():
                break
            entries.append(entry)
        pairs = zip(entries, what.pages, strict=False)
        moves = [(SWAP_IN, host_page, page) for (host_page, _), page in pairs]
        if moves:
            self._mover.run_beside(np.array(moves, np.int32))
        # A step may have written over a host page meanwhile.
        for count, (page_hash, entry) in enumerate(zip(what.hashes, entries, strict=False)):
            if self._names.find_in_host(page_hash) is not entry:
                return count
        return len(entries)


class PageTransfers:
    """One rank's pages, as others than steps read and write them.

    Args:
        next_step: epoch and number of the step that the runner takes next.
        overwritten: called with pages that are about to have new content.
        names: of the pages and states; transfers may bring some.
        peers: reads pages of other engines; None: none does.
    """

    def __init__(
        self,
        rank: int,
        next_step: Callable[[], tuple[int, int]],
        overwritten: Callable[[Int32Array], None],
        names: PageNames,
        peers: PageSource | None = None,
    ) -> None:
        self._rank = rank
        self._next_step = next_step
        self._overwritten = overwritten
        self._peers = peers
        self._names = names
        self._using = threading.Lock()  # held while a page is read or written
        self._pages: RowBytes | None = None
        self._states: tuple[StateTensors, RowBytes] | None = None
        self._folder: PageFolder | None = None
        self._disk: DiskPages | None = None
        self._host: HostPages | None = None
        self._epoch = -1

    def use(
        self,
        cache: KVTensors | None,
        epoch: int,
        folder: PageFolder | None = None,
        states: StateTensors | None = None,
        mover: PageMover | None = None,
    ) -> None:
        """Pages of ``cache`` are meant from now on, by transfers of ``epoch``; None: of nothing.

        Their files are in ``folder``, if they have any; some are in host memory, if ``mover`` moves
        them there. With recurrent layers there are ``states`` too. Returns when no transfer touches
        those of before.
        """
        with self._using:
            self._pages = None if cache is None else RowBytes.of_pages(cache)
            self._states = None if states is None else (states, RowBytes(states.tensors))
            self._epoch = epoch
            self._host = None if mover is None else HostPages(mover, self._names)
            if folder != self._folder:
                self._folder = folder
                self._disk = None if folder is None else DiskPages(folder, self._rank)

    def run(self, transfer: PageTransfer) -> int:
        """Carries out a transfer; returns how many of its first pages are where they belong."""
        disk = self._disk
        if transfer.named is not None:
            if self._wait_for(transfer.after):
                self._names.add(transfer.named, transfer.after)
            return 0
        if transfer.source == HOST:
            return self._read_host(transfer)
        if transfer.source:
            return 0 if self._peers is None else self._take(transfer, self._peers)
        if disk is None:
            return 0
        if transfer.forget:
            disk.remove_all()
            return 0
        count = 0
        try:
            count = self._write(transfer, disk) if transfer.write else self._take(transfer, disk)
        except OSError as error:
            disk.warn(error)
        disk.touch(transfer, count)
        return count

    def content(self, page: int, epoch: int | None = None) -> Bytes | None:
        """A copy of a page's bytes; None if there are no pages now, or not those of ``epoch``."""
        with self._using:
            if self._pages is None or epoch not in (None, self._epoch):
                return None
            return self._pages.read(page)

    def state(self, page_hash: bytes, epoch: int | None = None) -> Bytes | None:
        """A copy of the state behind a page; None if there is none, or not of ``epoch``."""
        known = self._names.find_state(page_hash)
        with self._using:
            if known is None or self._states is None or epoch not in (None, self._epoch):
                return None
            states, rows = self._states
            content = rows.read(states.row_of(*known))
        return content if self._names.find_state(page_hash) is known else None

    def _wait_for(self, step: tuple[int, int]) -> bool:
        """Waits until the step has run; False if it does not in time, or never will."""
        until = time.monotonic() + PAGE_READ_SECONDS
        while self._next_step() <= step:
            if time.monotonic() > until:
                return False
            time.sleep(PAGE_TURN_SECONDS)
        return True

    def _take(self, transfer: PageTransfer, source: PageSource) -> int:
        """Reads pages, and with recurrent layers the state behind them: both, or nothing."""
        if transfer.snapshot is None or self._states is None:
            return self._read(transfer, source)
        states, rows = self._states
        content, began = np.empty(rows.row_bytes, np.uint8), time.monotonic()
        count = source.state(transfer, content)
        left = transfer.seconds - (time.monotonic() - began)
        first = (transfer.pages[:count], transfer.hashes[:count], transfer.tokens[:count])
        pages, hashes, tokens = first
        some = replace(transfer, pages=pages, hashes=hashes, tokens=tokens, seconds=left)
        if not count or self._read(some, source) < count:
            return 0
        with self._using:
            if self._states is None or self._states[1] is not rows:
                return 0
            self._names.drop_state(transfer.snapshot)
            rows.write(states.row_of(transfer.snapshot), content)
            states.saved(transfer.snapshot, (len(transfer.before) + count) * tokens.shape[1])
            self._names.add_state(transfer.snapshot, hashes[-1])
        return count

    def _read(self, transfer: PageTransfer, source: PageSource) -> int:
        pages = self._pages
        if pages is None:
            return 0
        # A page is verified before any byte of it is where a step may read. Pages to read into may
        # be those of a request that has ended, and a step in flight still writes there.
        content, count = np.empty(pages.row_bytes, np.uint8), 0
        # In this order: a transfer without pages only meets its source.
        for _, page in zip(source.records(transfer, content), transfer.pages, strict=False):
            if not count and not self._wait_for(transfer.after):
                break
            with self._using:
                if self._pages is not pages or transfer.after[0] != self._epoch:
                    break
                if not count:
                    self._store(transfer)
                self._overwritten(np.array([page], np.int32))
                pages.write(page, content)
            count += 1
        return count

    def _read_host(self, transfer: PageTransfer) -> int:
        if not self._wait_for(transfer.after):
            return 0
        with self._using:
            if self._host is None or transfer.after[0] != self._epoch:
                return 0
            self._store(transfer)
            self._overwritten(np.array(transfer.pages, np.int32))
            return self._host.read(transfer)

    def _store(self, transfer: PageTransfer) -> None:
        """Saves what the pages hold that are about to be written to, where it has a place."""
        if self._host is not None and transfer.moves is not None:
            self._host.store(transfer.moves)

    def _write(self, transfer: PageTransfer, disk: DiskPages) -> int:
        # These pages are full, and their steps have run: their request has had a token behind them.
        triples = zip(transfer.pages, transfer.hashes, transfer.tokens, strict=True)
        for number, (page, page_hash, tokens) in enumerate(triples):
            if disk.holds(page_hash):
                continue
            if (content := self.content(page, transfer.after[0])) is None:
                return number
            disk.write(page_hash, tokens, content)
        if self._states is not None:
            self._write_state(transfer, disk)
        return len(transfer.pages)

    def _write_state(self, transfer: PageTransfer, disk: DiskPages) -> None:
        """Writes the last of the states behind the pages: those before it are of less use."""
        for page_hash, tokens in zip(transfer.hashes[::-1], transfer.tokens[::-1], strict=True):
            if (content := self.state(page_hash, transfer.after[0])) is not None:
                if not disk.holds(state_name(page_hash)):
                    disk.write(state_name(page_hash), tokens, content)
                return
