"""Page tables of a model with layers that see a window: pages behind it are freed.

vLLM calls this its hybrid KV cache manager. Layers are in groups of as many layers each: one group
of layers that see all tokens, and some *beside* it that see a window; or one group alone, where all
layers have a window. A page holds the tokens of one group, all groups share one pool, and a table
entry has a page of each group.

    entry            0    1    2    3    4
    all tokens     [ 17 |  4 |  9 | 21 | 30 ]
    window           -    -  [  5 | 22 |  7 ]    _first[slot] = 2: the pages before are free

What a page beside holds is known by the page of the full group that it was allocated with. While it
is free it keeps its content until it is allocated again, as other pages do, so a prefix is in the
cache if all pages of the full group are, and the last window's pages beside them.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rayfin.cache.page_tables import PageTables
from rayfin.cache.prefix_index import HashChain, PageName, Tokens

GONE = -1
"""An entry whose page is behind the window, where all layers have one."""


@dataclass(frozen=True, slots=True)
class WindowGroups:
    """The groups of a model's layers."""

    window: int  # tokens that a layer with a window sees, the own one among them: the widest
    beside: int  # groups with a window beside the full one; 0: every layer has a window
    reach: int = 1  # entries that a window and the chunk behind it touch at most

    @property
    def pages_per_entry(self) -> int:
        """Pages that a new table entry takes."""
        return 1 + self.beside

    def first_entry(self, position: int, page_size: int) -> int:
        """The first entry that the token at ``position`` sees in its window."""
        return max(position - self.window + 1, 0) // page_size

    def with_reach(self, most_tokens: int, page_size: int) -> "WindowGroups":
        """The same for chunks of ``most_tokens``."""
        return replace(self, reach=-(-(self.window - 1 + most_tokens) // page_size) + 1)

    def pages(self, entries: int) -> int:
        """Pages that a request of so many entries takes at most at one time."""
        in_window = min(entries, self.reach)
        return entries + self.beside * in_window if self.beside else in_window

    def most_entries(self, num_pages: int) -> int | None:
        """Entries of the longest request that ``num_pages`` hold; None: any number."""
        if not self.beside:
            return num_pages if num_pages < self.reach else None
        return max(num_pages // (1 + self.beside), num_pages - self.beside * self.reach)


class WindowTables(PageTables):
    """``PageTables`` that free what is behind the windows of the ``groups``.

    From its admission on a slot holds pages for its window and the chunk behind it, so prompts do
    not wait for each other's pages amid.
    """

    windowed = True

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        page_size: int,
        groups: WindowGroups,
        *,
        prefix_caching: bool = False,
    ) -> None:
        super().__init__(num_slots, num_pages, page_size, prefix_caching=prefix_caching)
        self.groups = groups
        self._first: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)  # entry in the window
        self._beside: dict[int, list[int]] = {}  # by page of the full group
        self._full_of: dict[int, int] = {}  # the same, the other way

    @property
    def num_free_entries(self) -> int:
        """New entries that free pages suffice for."""
        return self.pool.num_free // self.groups.pages_per_entry

    def grow(self, slot: int, num_tokens: int) -> bool:
        """See ``PageTables``."""
        entries = self.pages_for(num_tokens)
        return self._extend(slot, entries, entries)

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Makes room for a request of ``num_tokens`` tokens: in windows for the next step's."""
        entries = self.pages_for(num_tokens)
        return self._extend(slot, entries, min(entries, int(self._first[slot]) + self.groups.reach))

    def slide(self, slot: int, position: int) -> None:
        """Frees what no token of the slot from ``position`` on sees."""
        first = min(self.groups.first_entry(position, self.page_size), int(self.held[slot]))
        before = int(self._first[slot])
        if first <= before:
            return
        self._first[slot] = first
        pages = self._pages[slot][before:first]
        if self.groups.beside:
            self._free_beside(pages)
        else:
            # What is not in the index by now will not be.
            self.published[slot] = max(first, int(self.published[slot]))
            self._free(pages)
            self._pages[slot][before:first] = [GONE] * len(pages)

    def slide_all(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        """See ``PageTables``."""
        first = np.maximum(positions - self.groups.window + 1, 0) // self.page_size
        for row in np.flatnonzero(first > self._first[slots]).tolist():
            self.slide(int(slots[row]), int(positions[row]))

    def append_pages(self, slots: npt.NDArray[np.int64]) -> bool:
        """See ``PageTables``."""
        width = self.groups.pages_per_entry
        pages = self._allocate(len(slots) * width)
        if pages is None:
            return False
        for row, slot in enumerate(slots.tolist()):
            full, *beside = pages[row * width : (row + 1) * width]
            self._pages[slot].append(full)
            self._put_beside(full, beside)
        self.held[slots] += 1
        return True

    def match(self, chain: HashChain, tokens: Tokens) -> list[int]:
        """See ``PageTables``; pages that are not needed may be GONE."""
        if self.index is None:
            return []
        if not self.groups.beside:
            return self._match_windows(chain.hashes[: (len(tokens) - 1) // self.page_size], tokens)
        pages = super().match(chain, tokens)
        return pages[: self._end_of([page in self._beside for page in pages])]

    def _match_windows(self, hashes: Sequence[bytes], tokens: Tokens) -> list[int]:
        assert self.index is not None
        pages = [self.index.page(page_hash) for page_hash in hashes]
        end = self._end_of([page is not None for page in pages])
        first = self._first_of(end)
        seen = [page for page in pages[first:end] if page is not None]
        if not self.index.holds(seen, tokens[first * self.page_size :]):
            return []
        return [GONE] * first + seen

    def _end_of(self, there: Sequence[bool]) -> int:
        """Entries of the longest prefix whose last window is all ``there``."""
        end = entry = len(there)
        while entry > self._first_of(end):
            entry -= 1
            if not there[entry]:
                end = entry
        return end

    def _first_of(self, entries: int) -> int:
        """The first entry that the token behind so many full pages sees."""
        return self.groups.first_entry(entries * self.page_size, self.page_size)

    def reading(self, pages: Sequence[int]) -> list[int]:
        """See ``PageTables``."""
        seen = pages[self._first_of(len(pages)) :]
        if not self.groups.beside:
            return [page for page in seen if page != GONE]
        return [*pages, *(page for full in seen for page in self._beside.get(full, ()))]

    def prefix_of(self, slot: int, count: int) -> list[int] | None:
        """See ``PageTables``."""
        seen = self._first[slot] <= self._first_of(count)
        return self._pages[slot][:count] if seen else None

    def fits(self, num_tokens: int, pages: Sequence[int], more: int, spare: int) -> bool:
        """See ``PageTables``."""
        entries, shared, beside = self.pages_for(num_tokens), len(pages), self.groups.beside
        in_window = max(min(entries, self._first_of(shared) + self.groups.reach) - shared, 0)
        missing = max(entries - shared, 0) + beside * in_window if beside else in_window
        missing += more * self.groups.pages_per_entry + spare
        return missing <= self.num_free_without(pages)

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """See ``PageTables``."""
        self._share_from(slot, pages, self._first_of(len(pages)))

    def _share_from(self, slot: int, pages: Sequence[int], first: int) -> None:
        """Shares ``pages``, and in windows those from entry ``first`` on."""
        if self.groups.beside:
            super().share(slot, pages)
            for full in pages[first:]:
                for page in self._beside[full]:
                    self.pool.share(page)
        else:
            super().share(slot, pages[first:])
            self._pages[slot][:0] = [GONE] * first
            self.held[slot] = self.published[slot] = len(pages)
        self._first[slot] = first

    def fork(self, source: int, target: int, num_tokens: int) -> list[tuple[int, int]] | None:
        """See ``PageTables``; one (page, copy) for each group."""
        full, rest = divmod(num_tokens, self.page_size)
        first = max(self._first_of(full), int(self._first[source]))
        assert first <= self.groups.first_entry(num_tokens, self.page_size), "it is behind a window"
        pages: list[int] = []
        if rest:
            if (allocated := self._allocate(self.groups.pages_per_entry)) is None:
                return None
            pages = allocated
        self._share_from(target, self._pages[source][:full], first)
        self.published[source] = max(full, int(self.published[source]))
        if not rest:
            return []
        page = self._pages[source][full]
        self._pages[target].append(pages[0])
        self._put_beside(pages[0], pages[1:])
        self.held[target] += 1
        return list(zip([page, *self._beside.get(page, ())], pages, strict=True))

    def publish(self, slot: int, chain: HashChain, tokens: Tokens) -> None:
        """See ``PageTables``."""
        if self.index is not None and self.groups.beside:
            # A page that has lost those beside it gives way to one that has them.
            for number in range(int(self.published[slot]), len(tokens) // self.page_size):
                known = self.index.page(chain.hashes[number])
                if known is not None and known not in self._beside:
                    self._forget(known)
        super().publish(slot, chain, tokens)

    def _forget(self, page: int) -> None:
        assert self.index is not None
        self.index.drop(page)
        if page in self.claims:
            self.claims.drop(page)
            self.pool.release(page)
        self.num_cached -= self.pool.references[page] == 0

    def restore(self, names: Mapping[int, PageName]) -> None:
        """See ``PageTables``; which pages were beside others is not known any more."""
        if not self.groups.beside:
            super().restore(names)

    def entries_since(self, slot: int, count: int) -> list[int]:
        """See ``PageTables``: a page of each group for each entry, any where one is GONE."""
        pages = self._pages[slot][count : self.held[slot]]
        if not self.groups.beside:
            return [max(page, 0) for page in pages]
        none = [0] * self.groups.beside
        first = int(self._first[slot]) - count
        ids: list[int] = []
        for number, full in enumerate(pages):
            ids.append(full)
            ids += self._beside[full] if number >= first else none
        return ids

    def pages_since(self, slot: int, count: int) -> list[int]:
        """See ``PageTables``: those of the full group, or those in the window if there is none."""
        return [page for page in self._pages[slot][count:] if page != GONE]

    def release(self, slot: int) -> None:
        """See ``PageTables``."""
        pages = self._pages[slot]
        seen = pages[self._first[slot] : self.held[slot]]
        if self.groups.beside:
            self._free(pages)
            self._free_beside(seen)
        else:
            self._free(seen)
        pages.clear()
        self.held[slot] = self.published[slot] = self._first[slot] = 0

    def invalidate(self, slot: int) -> None:
        """See ``PageTables``."""
        super().invalidate(slot)
        for full in self._pages[slot]:
            self._unclaim(self._beside.get(full, ()))

    def _unclaim(self, beside: Sequence[int]) -> None:
        """Ends claims on pages whose page of the full group left the index."""
        for page in beside:
            if page in self.claims:
                self.claims.drop(page)
                self.pool.release(page)

    def pin(self, slot: int, num_tokens: int, tenant: str, until: float) -> None:
        """See ``PageTables``; some of the pages may be free already."""
        super().pin(slot, num_tokens, tenant, until)
        for page in self.reading(self._pages[slot][: num_tokens // self.page_size]):
            if page in self.claims:
                self.pool.keep(page)

    def claim(self, claimant: Hashable, pages: Sequence[int]) -> None:
        """See ``PageTables``."""
        super().claim(claimant, self.reading(pages))

    def _extend(self, slot: int, entries: int, in_window: int) -> bool:
        """Allocates pages of the full group up to ``entries``, and of the others ``in_window``."""
        pages, held, beside = self._pages[slot], int(self.held[slot]), self.groups.beside
        new = max(in_window - held, 0)
        more = max(entries - len(pages), 0) if beside else new
        if not new and not more:
            return True
        allocated = self._allocate(more + beside * new)
        if allocated is None:
            return False
        pages.extend(allocated[:more])
        for number in range(new if beside else 0):
            start = more + number * beside
            self._put_beside(pages[held + number], allocated[start : start + beside])
        self.held[slot] += new
        return True

    def _put_beside(self, full: int, pages: list[int]) -> None:
        if pages:
            self._beside[full] = pages
            self._full_of.update(dict.fromkeys(pages, full))

    def _free_beside(self, fulls: Sequence[int]) -> None:
        """Removes a reference to the pages beside those of the full group."""
        for full in reversed(fulls):
            known = self.index is not None and full in self.index
            for page in self._beside[full]:
                keep = known and page in self.claims
                self.pool.free(page, reuse_first=not known, keep=keep)

    def _allocate(self, count: int, *, lent: bool = False) -> list[int] | None:
        pages = super()._allocate(count, lent=lent)
        if pages is not None and self._beside:
            for page in pages:
                full = self._full_of.get(page, page)
                beside = self._beside.pop(full, ())
                self._unclaim(beside)
                for other in beside:
                    del self._full_of[other]
        return pages

    def pages_of(self, slot: int) -> list[int]:
        """See ``PageTables``."""
        pages = self.pages_since(slot, 0)
        seen = self._pages[slot][self._first[slot] : self.held[slot]]
        return [*pages, *(page for full in seen for page in self._beside.get(full, ()))]

    def _is_counted(self, slot: int) -> bool:
        entries, held = len(self._pages[slot]), int(self.held[slot])
        counted = held <= entries if self.groups.beside else held == entries
        return counted and 0 <= self._first[slot] <= held

    def _is_known(self, page: int) -> bool:
        return super()._is_known(self._full_of.get(page, page))
