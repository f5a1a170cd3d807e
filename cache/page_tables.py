"""Which pages each running request holds: the ledger that the scheduler decides by."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rayfin.cache.errors import CacheError
from rayfin.cache.page_pool import PagePool
from rayfin.cache.prefix_index import HashChain, PrefixIndex, Tokens


class PageTables:
    """One append-only page table for each slot of the engine.

        slot 3:  [ 17 | 4 | 9 ]          held[3] = 3
                   │    │   └── tokens 32..47 (page_size 16)
                   │    └────── tokens 16..31
                   └─────────── tokens  0..15

    Ids live here; tensors live in the runner, which follows by the ``new_pages`` of each step and
    never allocates. Full pages may be known to the prefix index: then other tables share them, and
    they keep their content while they are free, until they are taken again (least recently used
    first).
    """

    def __init__(
        self, num_slots: int, num_pages: int, page_size: int, *, prefix_caching: bool = False
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.held: npt.NDArray[np.int32] = np.zeros(num_slots, np.int32)  # pages of each slot
        self.published: npt.NDArray[np.int32] = np.zeros(num_slots, np.int32)  # in the index, or
        # shared without it: the slot's first pages, which it need not publish any more
        self.index = PrefixIndex(num_pages, page_size) if prefix_caching else None
        self.num_cached = 0  # free pages that the index knows
        self.num_evicted = 0  # of those, pages that were taken for something else, so far
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.page_size)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Makes room for the slot's first ``num_tokens`` tokens; False, with no effect, if none."""
        missing = self.pages_for(num_tokens) - len(self._pages[slot])
        if missing <= 0:
            return True
        pages = self._take(missing)
        if pages is None:
            return False
        self._pages[slot].extend(pages)
        self.held[slot] += missing
        return True

    def append_pages(self, slots: npt.NDArray[np.int64]) -> bool:
        """One more page for each of the slots [N]; False, with no effect, if that is too many."""
        pages = self._take(len(slots))
        if pages is None:
            return False
        for slot, page in zip(slots.tolist(), pages, strict=True):
            self._pages[slot].append(page)
        self.held[slots] += 1
        return True

    def match(self, chain: HashChain, tokens: Tokens) -> list[int]:
        """Pages that hold the head of ``tokens``; never the last token, whose logits are needed."""
        if self.index is None:
            return []
        most = (len(tokens) - 1) // self.page_size
        return self.index.match(chain.hashes[:most], tokens)

    def num_free_without(self, pages: Sequence[int]) -> int:
        """Free pages once ``pages`` are held."""
        return self.pool.num_free - sum(self.pool.references[page] == 0 for page in pages)

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """The empty table starts with ``pages``, shared with whoever holds them."""
        for page in pages:
            if self.pool.references[page] == 0:
                self.num_cached -= 1
            self.pool.share(page)
        self._pages[slot].extend(pages)
        self.held[slot] = self.published[slot] = len(pages)

    def fork(self, source: int, target: int, num_tokens: int) -> list[tuple[int, int]] | None:
        """The empty table of ``target`` starts with the first ``num_tokens`` tokens of ``source``.

        Full pages are shared. The page that those tokens end in is one that both will write to, so
        the target gets its own (copy-on-write of vLLM's paper, arXiv:2309.06180, done at once).

        Returns:
            The (page, copy) that must be carried out before either of them writes: one or none.
            None instead, with no effect, if no page is free.
        """
        full, rest = divmod(num_tokens, self.page_size)
        copies = []
        if rest:
            if (taken := self._take(1)) is None:
                return None
            copies = [(self._pages[source][full], taken[0])]
        self.share(target, self._pages[source][:full])
        self.published[source] = max(full, int(self.published[source]))
        self._pages[target].extend(page for _, page in copies)
        self.held[target] += len(copies)
        return copies

    def publish(self, slot: int, chain: HashChain, tokens: Tokens) -> None:
        """Makes the slot's pages that ``tokens`` fill known; the chain must reach as far.

        ``tokens`` are the slot's first ones, scheduled or computed: a step runs after those before
        it, so whoever shares the page reads it after it was written.
        """
        if self.index is None:
            return
        size, full = self.page_size, len(tokens) // self.page_size
        for number in range(int(self.published[slot]), full):
            page = self._pages[slot][number]
            self.index.add(page, chain.hashes[number], tokens[number * size : (number + 1) * size])
        self.published[slot] = max(full, int(self.published[slot]))

    def invalidate(self, slot: int) -> None:
        """Forgets what the slot's pages hold: something went wrong in writing them."""
        if self.index is not None:
            for page in self._pages[slot]:
                self.index.drop(page)

    def pages_since(self, slot: int, count: int) -> list[int]:
        """The slot's pages after the first ``count``: news for a runner that knows those."""
        return self._pages[slot][count:]

    def release(self, slot: int) -> None:
        """Gives back all of the slot's pages, tail first, so that heads of prompts live longest."""
        for page in reversed(self._pages[slot]):
            known = self.index is not None and page in self.index
            self.pool.free(page, reuse_first=self.index is not None and not known)
            if known and self.pool.references[page] == 0:
                self.num_cached += 1
        self._pages[slot].clear()
        self.held[slot] = self.published[slot] = 0

    def _take(self, count: int) -> list[int] | None:
        """Free pages, whose old content is forgotten; None, with no effect, if too few."""
        pages = self.pool.allocate(count)
        if pages is not None and self.index is not None:
            evicted = sum(self.index.drop(page) for page in pages)
            self.num_cached -= evicted
            self.num_evicted += evicted
        return pages

    def forget(self) -> None:
        """What the pages hold is not to be found any more."""
        if self.index is not None:
            self.index.clear()
        self.num_cached = 0

    @property
    def num_held(self) -> int:
        """Pages that are not free."""
        return self.pool.num_pages - self.pool.num_free

    def check_integrity(self) -> None:
        """Every page is free or held, counts agree, no page twice in a table, the index is right.

        O(pages).

        Raises:
            CacheError: with the first broken rule.
        """
        self.pool.check_integrity(Counter(page for pages in self._pages for page in pages))
        for slot, pages in enumerate(self._pages):
            if len(set(pages)) != len(pages) or self.held[slot] != len(pages):
                raise CacheError(f"the table of slot {slot} is wrong: {pages}")
            if not 0 <= self.published[slot] <= len(pages):
                raise CacheError(f"{self.published[slot]} pages of slot {slot} are known: {pages}")
        if self.index is not None:
            known = sum(page in self.index for page in self.pool.free_pages())
            if known != self.num_cached:
                raise CacheError(f"{known} free pages are known, {self.num_cached} counted")
            self.index.check_integrity()
            for slot, pages in enumerate(self._pages):
                for page in pages[self.published[slot] :]:
                    if page in self.index:
                        raise CacheError(f"page {page} of slot {slot} is known before it is full")
