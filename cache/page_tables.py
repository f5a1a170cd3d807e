"""The page table of each running request, which the scheduler decides by."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rayfin.cache.errors import CacheError
from rayfin.cache.page_claims import PageClaims, PrefixPins
from rayfin.cache.page_pool import PagePool
from rayfin.cache.prefix_index import HashChain, NameChanges, PageName, PrefixIndex, Tokens


class PageTables:
    """One append-only page table for each slot of the engine. (A page is vLLM's block.)

        slot 3:  [ 17 | 4 | 9 ]          held[3] = 3
                   │    │   └── tokens 32..47 (page_size 16)
                   │    └────── tokens 16..31
                   └─────────── tokens  0..15

    The ids live here. The tensors live in the runner, which gets the ``new_pages`` of each step and
    never allocates pages. Full pages may be in the prefix index: other tables can then share them,
    and they keep their content while they are free, until they are allocated again (least recently
    used first). Pages that are claimed go after all others, claim by claim: pins, then what
    ``reclaim`` gives up, which returns whether there was something. ``WindowTables`` free pages
    earlier, of models whose layers see a window.
    """

    windowed = False  # whether ``slide`` frees pages, and ``reserve`` does not take all

    def __init__(
        self, num_slots: int, num_pages: int, page_size: int, *, prefix_caching: bool = False
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.held: npt.NDArray[np.int32] = np.zeros(num_slots, np.int32)  # pages of each slot
        self.published: npt.NDArray[np.int32] = np.zeros(num_slots, np.int32)  # pages
        # at the start of the slot that are in the index, or shared, and need not be published again
        self.index = PrefixIndex(num_pages, page_size) if prefix_caching else None
        self.claims = PageClaims()  # pages of the index to keep ...
        self.pins = PrefixPins(self.claims, num_pages)  # ... and those of them to keep for a time
        self.reclaim: Callable[[], bool] = lambda: False
        # Called with pages that are about to leave the index because they are allocated again.
        self.evicting: Callable[[list[int]], None] = lambda pages: None
        self.num_cached = 0  # free pages in the index
        self.num_evicted = 0  # pages that left the index because they were allocated again
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]
        self._lent: Counter[int] = Counter()  # pages that files are read into, or written from

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.page_size)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Makes room for the slot's first ``num_tokens`` tokens; False, with no effect, if none."""
        missing = self.pages_for(num_tokens) - len(self._pages[slot])
        if missing <= 0:
            return True
        pages = self._allocate(missing)
        if pages is None:
            return False
        self._pages[slot].extend(pages)
        self.held[slot] += missing
        return True

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Makes room for a request that has ``num_tokens`` tokens, as ``grow`` does."""
        return self.grow(slot, num_tokens)

    def slide(self, slot: int, position: int) -> None:
        """Frees pages that no token of the slot from ``position`` on reads."""

    def slide_all(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        """The same for slots [N] and their positions [N]."""

    def append_pages(self, slots: npt.NDArray[np.int64]) -> bool:
        """Adds a page to each of the slots [N], or returns False, with no effect, if too few."""
        pages = self._allocate(len(slots))
        if pages is None:
            return False
        for slot, page in zip(slots.tolist(), pages, strict=True):
            self._pages[slot].append(page)
        self.held[slots] += 1
        return True

    def match(self, chain: HashChain, tokens: Tokens) -> list[int]:
        """Pages that hold a prefix of ``tokens``, without the last one: its logits are needed."""
        if self.index is None:
            return []
        max_pages = (len(tokens) - 1) // self.page_size
        return self.index.match(chain.hashes[:max_pages], tokens)

    @property
    def num_free_entries(self) -> int:
        """New entries of tables that free pages suffice for."""
        return self.pool.num_free

    def reading(self, pages: Sequence[int]) -> list[int]:
        """All pages that a request holds to go on from the prefix in ``pages``."""
        return list(pages)

    def num_free_without(self, pages: Sequence[int]) -> int:
        """Free pages once the prefix in ``pages`` is held."""
        references = self.pool.references
        return self.pool.num_free - sum(references[page] == 0 for page in self.reading(pages))

    def fits(self, num_tokens: int, pages: Sequence[int], more: int, spare: int) -> bool:
        """Whether a request of ``num_tokens`` tokens can go on from the prefix in ``pages``.

        ``more`` entries beside its own must fit, and ``spare`` pages remain free.
        """
        missing = self.pages_for(num_tokens) - len(pages) + more
        return missing + spare <= self.num_free_without(pages)

    def prefix_of(self, slot: int, count: int) -> list[int] | None:
        """The slot's first ``count`` pages for others to share; None if too many of them are
        free."""
        return self._pages[slot][:count]

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Starts the empty table with ``pages``, which other tables may hold as well."""
        for page in pages:
            if self.pool.references[page] == 0:
                self.num_cached -= 1
            self.pool.share(page)
        self._pages[slot].extend(pages)
        self.held[slot] = self.published[slot] = len(pages)

    def fork(self, source: int, target: int, num_tokens: int) -> list[tuple[int, int]] | None:
        """Starts the empty table of ``target`` with the first ``num_tokens`` tokens of ``source``.

        Full pages are shared. Both will write to a page that is not full, so the target gets a copy
        of it (copy-on-write of vLLM's paper, arXiv:2309.06180, done at once).

        Returns:
            At most one (page, copy), to be copied before either slot writes; or None, with no
            effect, if no page is free.
        """
        full, rest = divmod(num_tokens, self.page_size)
        copies = []
        if rest:
            if (pages := self._allocate(1)) is None:
                return None
            copies = [(self._pages[source][full], pages[0])]
        self.share(target, self._pages[source][:full])
        self.published[source] = max(full, int(self.published[source]))
        self._pages[target].extend(page for _, page in copies)
        self.held[target] += len(copies)
        return copies

    def publish(self, slot: int, chain: HashChain, tokens: Tokens) -> None:
        """Adds the slot's pages that ``tokens`` fill to the index; the chain must cover them.

        ``tokens`` are the slot's first ones, scheduled or computed. Steps run in order, so a
        request that shares the page reads it after it is written.
        """
        if self.index is None:
            return
        size, full = self.page_size, len(tokens) // self.page_size
        for number in range(int(self.published[slot]), full):
            page, hashes = self._pages[slot][number], chain.hashes
            its = tokens[number * size : (number + 1) * size]
            parent = hashes[number - 1] if number else None
            self.index.add(page, hashes[number], its, parent, chain.keys)
        self.published[slot] = max(full, int(self.published[slot]))

    def restore(self, names: Mapping[int, PageName]) -> None:
        """Fills the index of empty tables with what their pages hold already.

        Pages that were named last are reused first: the end of a prompt before its start.
        """
        if self.index is None:
            return
        for page, name in reversed(list(names.items())):
            tokens = np.frombuffer(name.tokens, np.int32)
            if self.index.add(page, name.page_hash, tokens, name.parent, name.keys):
                self.pool.share(page)
                self.pool.free(page)
                self.num_cached += 1

    def name_changes(self) -> NameChanges | None:
        """What has changed in the index since the last call; None: nothing."""
        return None if self.index is None else self.index.changes()

    def pin(self, slot: int, num_tokens: int, tenant: str, until: float) -> None:
        """Keeps the slot's published pages of its first ``num_tokens`` tokens (``PrefixPins``).

        Args:
            until: seconds of the clock of ``expire_pins``.
        """
        if self.index is not None:
            pages = self.reading(self._pages[slot][: num_tokens // self.page_size])
            known = [page for page in pages if self._is_known(page)]
            self._unkeep(self.pins.pin(tenant, known, until))

    def expire_pins(self, now: float) -> None:
        """Ends pins whose time is over."""
        self._unkeep(self.pins.expire(now))

    def end_pin(self) -> bool:
        """Ends the pin that is due first, and returns whether there was one."""
        pages = self.pins.end_next()
        self._unkeep(pages or ())
        return pages is not None

    def claim(self, claimant: Hashable, pages: Sequence[int]) -> None:
        """Claims ``pages`` of the index instead of what it claimed, until ``unclaim``."""
        self._unkeep(self.claims.claim(claimant, pages))
        for page in pages:
            self.pool.keep(page)

    def extend_claim(self, claimant: Hashable, pages: Sequence[int]) -> None:
        """Claims ``pages`` of the index behind those that it claims."""
        self.claims.extend(claimant, pages)
        for page in pages:
            self.pool.keep(page)

    def find(self, claimant: Hashable, hashes: Sequence[bytes]) -> tuple[int, list[int]]:
        """The longest prefix in the index by its hashes: how many pages at its start are the whole
        claim of ``claimant``, which need no look each, and the pages behind those."""
        if self.index is None:
            return 0, []
        count = self.claims.count(claimant)
        # A hash stands for all tokens before it, so the last one is enough.
        if not 0 < count <= len(hashes) or (
            self.index.page(hashes[count - 1]) != self.claims.last(claimant)
        ):
            count = 0
        return count, self.index.find(hashes[count:])

    def unclaim(self, claimant: Hashable) -> None:
        """Ends a claim; pages that are free and that no other claims are like all others."""
        self._unkeep(self.claims.end(claimant))

    @property
    def num_unclaimed(self) -> int:
        """Free pages without a claim."""
        return self.pool.num_free - self.pool.num_kept

    def _unkeep(self, pages: Sequence[int]) -> None:
        """Pages are claimed no longer: the end of a prefix is reused before its start."""
        for page in reversed(pages):
            self.pool.release(page)

    def invalidate(self, slot: int) -> None:
        """Removes the slot's pages from the index, after an error in writing them."""
        if self.index is not None:
            for page in self.pages_since(slot, 0):
                self.index.drop(page)
                self.claims.drop(page)

    def pages_since(self, slot: int, count: int) -> list[int]:
        """The slot's pages after the first ``count``."""
        return self._pages[slot][count:]

    def pages_of(self, slot: int) -> list[int]:
        """All pages that the slot holds."""
        return self._pages[slot]

    def entries_since(self, slot: int, count: int) -> list[int]:
        """The entries of the slot's table after the first ``count``, which the runner has."""
        return self._pages[slot][count:]

    def release(self, slot: int) -> None:
        """Frees all of the slot's pages, tail first, so that heads of prompts stay longest."""
        self._free(self._pages[slot])
        self._pages[slot].clear()
        self.held[slot] = self.published[slot] = 0

    def lend(self, pages: Sequence[int]) -> None:
        """Holds ``pages`` of the index, so that they keep their content until ``give_back``."""
        for page in pages:
            if self.pool.references[page] == 0:
                self.num_cached -= 1
            self.pool.share(page)
        self._lent.update(pages)

    def lend_new(self, count: int) -> list[int] | None:
        """Allocates ``count`` pages until ``give_back``, or returns None, with no effect."""
        pages = self._allocate(count, lent=True)
        self._lent.update(pages or ())
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Ends a loan; pages that are in the index by now can be found."""
        self._lent.subtract(pages)
        self._lent = +self._lent
        self._free(pages)

    def _free(self, pages: Sequence[int]) -> None:
        """Removes a reference to each page, tail first."""
        for page in reversed(pages):
            known = self._is_known(page)
            # What is of no use is written over before a page whose memory was never touched.
            self.pool.free(page, reuse_first=not known, keep=known and page in self.claims)
            if known and self.pool.references[page] == 0:
                self.num_cached += 1

    def _is_known(self, page: int) -> bool:
        """Whether another request may find the page's content."""
        return self.index is not None and page in self.index

    def _allocate(self, count: int, *, lent: bool = False) -> list[int] | None:
        """Allocates pages and removes them from the index, or returns None, with no effect."""
        if self.num_unclaimed < count <= self.pool.num_free:
            while self.num_unclaimed < count and (self.end_pin() or self.reclaim()):
                pass
        pages = self.pool.allocate(count)
        if pages is not None and self.index is not None:
            self.evicting(pages)
            evicted = sum(self.index.drop(page, keeps=lent) for page in pages)
            for page in self.claims.among(pages):
                self.claims.drop(page)
            self.num_cached -= evicted
            self.num_evicted += evicted
        return pages

    def reset_prefix_cache(self) -> None:
        """Removes all pages from the prefix index."""
        if self.index is not None:
            self.index.clear()
        self._unkeep(self.claims.clear())
        self.pins.clear()
        self.num_cached = 0

    @property
    def num_held(self) -> int:
        """Pages that tables hold: neither free nor only lent."""
        references = self.pool.references
        lent = sum(references[page] == count for page, count in list(self._lent.items()))
        return self.pool.num_pages - self.pool.num_free - lent

    def _is_counted(self, slot: int) -> bool:
        return bool(self.held[slot] == len(self._pages[slot]))

    def check_integrity(self) -> None:
        """Checks in O(pages) the pool, the counts, the tables and the index against each other.

        Raises:
            CacheError: A rule is broken; the message names the first one.
        """
        slots = range(len(self._pages))
        held = Counter(page for slot in slots for page in self.pages_of(slot))
        self.pool.check_integrity(held + self._lent)
        for slot, pages in enumerate(self._pages):
            ids = self.pages_of(slot)
            if len(set(ids)) != len(ids) or not self._is_counted(slot):
                raise CacheError(f"the table of slot {slot} is wrong: {pages}")
            if not 0 <= self.published[slot] <= len(pages):
                raise CacheError(f"{self.published[slot]} pages of slot {slot} are known: {pages}")
        if self.index is not None:
            known = sum(page in self.index for page in self.pool.free_pages())
            if known != self.num_cached:
                raise CacheError(f"{known} free pages are known, {self.num_cached} counted")
            self.index.check_integrity()
            kept = set(self.pool.kept_pages())
            if kept != {page for page in self.pool.free_pages() if page in self.claims}:
                raise CacheError(f"pages {sorted(kept)[:8]} are kept, others claimed")
            if not kept <= {page for page in self.pool.free_pages() if self._is_known(page)}:
                raise CacheError("a page is kept that is not known")
            for slot, pages in enumerate(self._pages):
                for page in pages[self.published[slot] :]:
                    if page in self.index:
                        raise CacheError(f"page {page} of slot {slot} is known before it is full")
