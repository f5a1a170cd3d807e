"""The pool of page ids: a free list, and a reference count for each page."""

from collections import Counter

from rayfin.cache.errors import CacheError


class PagePool:
    """Preallocated page ids ``0 .. num_pages - 1`` with reference counts.

    Free pages form an intrusive doubly linked list (vLLM's free block queue): allocating a page,
    freeing one and removing one from the middle are O(1) and allocate no memory. ``num_pages`` is
    the list's sentinel. Pages are freed at the tail and allocated at the head, so the page that has
    been free for longest is reused first. Pages to *keep* are in a second list, whose pages are
    allocated where the first one is empty; ``num_kept`` counts them.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise CacheError(f"a page pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self.num_free = num_pages
        self.references = [0] * num_pages
        self.num_kept = 0
        self._is_kept = bytearray(num_pages)
        self._kept = num_pages + 1  # the sentinel of the second list
        self._next = [*range(1, num_pages + 1), 0, self._kept]
        self._previous = [num_pages, *range(num_pages), self._kept]

    def allocate(self, count: int) -> list[int] | None:
        """Returns ``count`` pages with one reference each, or None, with no effect, if too few."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            page = self._next[self.num_pages]
            if page == self.num_pages:
                page = self._next[self._kept]
            self._unlink(page)
            self.references[page] = 1
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """Adds a reference to the page; a free page leaves the free list."""
        if self.references[page] == 0:
            self._unlink(page)
        self.references[page] += 1

    def free(self, page: int, *, reuse_first: bool = False, keep: bool = False) -> None:
        """Removes a reference; a page without references becomes free.

        ``reuse_first`` puts it at the head of the list, for a page whose content is of no use;
        ``keep`` behind all others.

        Raises:
            CacheError: The page has no references (a double free).
        """
        if self.references[page] == 0:
            raise CacheError(f"page {page} is freed twice")
        self.references[page] -= 1
        if self.references[page] == 0:
            if keep:
                self._keep(page)
            else:
                end = self.num_pages
                self._link(page, after=end if reuse_first else self._previous[end])

    def keep(self, page: int) -> None:
        """A page is to be kept from now on; nothing happens unless it is free."""
        if self.references[page] == 0 and not self._is_kept[page]:
            self._unlink(page)
            self._keep(page)

    def release(self, page: int) -> None:
        """A page that was to be kept is so no longer; nothing happens unless it is free."""
        if self.references[page] == 0:
            self._unlink(page)
            self._link(page, after=self._previous[self.num_pages])

    def free_pages(self) -> list[int]:
        """The free pages in the order of allocation, in O(free), for tests and integrity checks."""
        return [*self._listed(self.num_pages), *self.kept_pages()]

    def kept_pages(self) -> list[int]:
        """The last of them: free pages to keep."""
        return self._listed(self._kept)

    def _listed(self, end: int) -> list[int]:
        pages = []
        page = self._next[end]
        while page != end:
            pages.append(page)
            page = self._next[page]
        return pages

    def check_integrity(self, holders: Counter[int]) -> None:
        """Checks in O(pages) that each page is free or has ``holders[page]`` references.

        Raises:
            CacheError: A rule is broken; the message names the first one.
        """
        free = self.free_pages()
        if len(free) != self.num_free or len(set(free)) != len(free):
            raise CacheError(f"the free list has {len(free)} pages, {self.num_free} counted")
        if len(kept := self.kept_pages()) != self.num_kept:
            raise CacheError(f"{len(kept)} pages are kept, {self.num_kept} counted")
        for page in range(self.num_pages):
            if self.references[page] != holders[page]:
                raise CacheError(
                    f"page {page} is held by {holders[page]} tables, "
                    f"counted {self.references[page]}"
                )
        if both := set(free) & holders.keys():
            raise CacheError(f"pages {sorted(both)[:8]} are free and held")
        if len(free) + len(holders) != self.num_pages:
            raise CacheError("a page is neither free nor held")

    def _keep(self, page: int) -> None:
        self._link(page, after=self._previous[self._kept])
        self._is_kept[page] = 1
        self.num_kept += 1

    def _unlink(self, page: int) -> None:
        self.num_kept -= self._is_kept[page]
        self._is_kept[page] = 0
        before, after = self._previous[page], self._next[page]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link(self, page: int, after: int) -> None:
        before = self._next[after]
        self._next[after] = page
        self._previous[page] = after
        self._next[page] = before
        self._previous[before] = page
        self.num_free += 1
