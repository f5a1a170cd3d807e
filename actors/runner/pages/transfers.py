"""Moves pages of the cache from their sources, and to the disk, on threads beside the steps."""

import threading
import time
from collections.abc import Callable

import numpy as np

from rayfin.actors.messages import Int32Array, PageTransfer
from rayfin.actors.runner.page_names import PageNames
from rayfin.actors.runner.pages.disk import DiskPages
from rayfin.actors.runner.pages.records import Bytes, PageBytes, PageSource
from rayfin.actors.timing import PAGE_READ_SECONDS, PAGE_TURN_SECONDS
from rayfin.cache.kv_tensors import KVTensors
from rayfin.cache.page_files import PageFolder


class PageTransfers:
    """One rank's pages, as others than steps read and write them.

    Args:
        next_step: epoch and number of the step that the runner takes next.
        overwritten: called with pages that are about to have new content.
        peers: reads pages of other engines; None: none does.
        names: of the pages, where transfers bring some.
    """

    def __init__(
        self,
        rank: int,
        next_step: Callable[[], tuple[int, int]],
        overwritten: Callable[[Int32Array], None],
        peers: PageSource | None = None,
        names: PageNames | None = None,
    ) -> None:
        self._rank = rank
        self._next_step = next_step
        self._overwritten = overwritten
        self._peers = peers
        self._names = names
        self._using = threading.Lock()  # held while a page is read or written
        self._pages: PageBytes | None = None
        self._folder: PageFolder | None = None
        self._disk: DiskPages | None = None
        self._epoch = -1

    def use(self, cache: KVTensors | None, epoch: int, folder: PageFolder | None = None) -> None:
        """Pages of ``cache`` are meant from now on, by transfers of ``epoch``; None: of nothing.

        Their files are in ``folder``, if they have any. Returns when no transfer touches the pages
        of before.
        """
        with self._using:
            self._pages = None if cache is None else PageBytes(cache)
            self._epoch = epoch
            if folder != self._folder:
                self._folder = folder
                self._disk = None if folder is None else DiskPages(folder, self._rank)

    def run(self, transfer: PageTransfer) -> int:
        """Carries out a transfer; returns how many of its first pages are where they belong."""
        disk = self._disk
        if transfer.named is not None:
            if self._names is not None and self._wait_for(transfer.after):
                self._names.add(transfer.named, transfer.after)
            return 0
        if transfer.source:
            return 0 if self._peers is None else self._read(transfer, self._peers)
        if disk is None:
            return 0
        if transfer.forget:
            disk.remove_all()
            return 0
        count = 0
        try:
            count = self._write(transfer, disk) if transfer.write else self._read(transfer, disk)
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

    def _wait_for(self, step: tuple[int, int]) -> bool:
        """Waits until the step has run; False if it does not in time, or never will."""
        until = time.monotonic() + PAGE_READ_SECONDS
        while self._next_step() <= step:
            if time.monotonic() > until:
                return False
            time.sleep(PAGE_TURN_SECONDS)
        return True

    def _read(self, transfer: PageTransfer, source: PageSource) -> int:
        pages = self._pages
        if pages is None:
            return 0
        # A page is verified before any byte of it is where a step may read. Pages to read into may
        # be those of a request that has ended, and a step in flight still writes there.
        content, count = np.empty(pages.page_bytes, np.uint8), 0
        # In this order: a transfer without pages only meets its source.
        for _, page in zip(source.records(transfer, content), transfer.pages, strict=False):
            if not count and not self._wait_for(transfer.after):
                break
            with self._using:
                if self._pages is not pages or transfer.after[0] != self._epoch:
                    break
                self._overwritten(np.array([page], np.int32))
                pages.write(page, content)
            count += 1
        return count

    def _write(self, transfer: PageTransfer, disk: DiskPages) -> int:
        # These pages are full, and their steps have run: their request has had a token behind them.
        triples = zip(transfer.pages, transfer.hashes, transfer.tokens, strict=True)
        for number, (page, page_hash, tokens) in enumerate(triples):
            if disk.holds(page_hash):
                continue
            if (content := self.content(page, transfer.after[0])) is None:
                return number
            disk.write(page_hash, tokens, content)
        return len(transfer.pages)
