"""Finds full pages by the hash of all tokens up to their end.

A page's hash is SHA-256(hash of the page before it, the page's tokens). The first page's parent is
the hash of the request's *extra keys* (adapter, image, ``cache_salt``). So two requests share a
page only if everything that its keys and values depend on is equal. This is vLLM's hash chain with
the fixes of its advisories: no weak hash, and the page's tokens are compared on a hit.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rayfin.cache.errors import CacheError

Tokens = npt.NDArray[np.int32]

Digests: TypeAlias = npt.NDArray[np.uint64]
"""The first eight bytes of hashes: enough for who only guesses where pages are."""


class PageName(NamedTuple):
    """What a full page holds."""

    page_hash: bytes  # of all tokens up to its end
    tokens: bytes  # its own, as int32
    parent: bytes | None = None  # the hash of the page before it
    keys: tuple[str, ...] = ()  # the extra keys of its chain


_Row: TypeAlias = tuple[bytes, bytes, bytes | None, tuple[str, ...]]
"""The values of a ``PageName``: the scheduler has better to do than to make objects."""


class NameChanges(NamedTuple):
    """Pages that have become known, and pages that are known no longer."""

    rows: Mapping[int, _Row]  # by page
    dropped: list[int]

    @property
    def named(self) -> dict[int, PageName]:
        """Names by page."""
        return {page: PageName(*row) for page, row in self.rows.items()}


class HashChain:
    """The hashes of the full pages of one growing token sequence."""

    def __init__(self, page_size: int, extra_keys: Sequence[str] = ()) -> None:
        self._page_size = page_size
        self.keys = tuple(extra_keys)
        root = sha256()
        for key in extra_keys:  # length first: ("ab", "c") and ("a", "bc") differ
            encoded = key.encode()
            root.update(len(encoded).to_bytes(8, "big") + encoded)
        self.root = root.digest()
        self.hashes: list[bytes] = []

    def extend(self, tokens: Tokens) -> None:
        """Hashes the pages that have become full; ``tokens`` is the whole sequence so far."""
        size = self._page_size
        parent = self.hashes[-1] if self.hashes else self.root
        for index in range(len(self.hashes), len(tokens) // size):
            page = np.ascontiguousarray(tokens[index * size : (index + 1) * size], np.int32)
            parent = sha256(parent + page.tobytes()).digest()
            self.hashes.append(parent)


def digests_of(hashes: Sequence[bytes]) -> Digests:
    """Returns those of N hashes [N]."""
    return np.frombuffer(b"".join(page_hash[:8] for page_hash in hashes), np.uint64)


class IndexObserver(Protocol):
    """Hears of each change of an index, on the thread that makes it; it may keep no tokens."""

    def stored(
        self, page_hash: bytes, parent: bytes | None, tokens: Tokens, keys: tuple[str, ...]
    ) -> None:
        """A page is added, behind the one with the hash ``parent``."""
        ...

    def removed(self, page_hash: bytes) -> None:
        """A page is dropped."""
        ...

    def cleared(self) -> None:
        """All pages are."""
        ...


class PrefixIndex:
    """Full pages that can be shared, free or held; for each hash the first page that had it.

    The tokens are one array [num_pages, page_size] of int32: a small object for each page would
    fragment the heap when all are dropped.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_pages
        self._tokens_of: Tokens = np.zeros((num_pages, page_size), np.int32)
        self._before: list[tuple[bytes | None, tuple[str, ...]]] = [(None, ())] * num_pages
        # Pages since ``changes`` was last called: those that are known, and those that are not.
        self._named: dict[int, _Row] = {}
        self._dropped: dict[int, None] = {}
        self.observer: IndexObserver | None = None

    def __contains__(self, page: int) -> bool:
        return self._hash_of[page] is not None

    def __len__(self) -> int:
        return len(self._page_of)

    def hashes(self) -> list[bytes]:
        """Those of all pages, for tests."""
        return list(self._page_of)

    def digests(self, limit: int) -> Digests | None:
        """Digests of all hashes [N], sorted; None if there are more than ``limit``.

        Any thread may ask.
        """
        hashes = list(self._page_of)
        return None if len(hashes) > limit else np.sort(digests_of(hashes))

    def page(self, page_hash: bytes) -> int | None:
        """The page with a hash; None if there is none."""
        return self._page_of.get(page_hash)

    def holds(self, pages: Sequence[int], tokens: Tokens) -> bool:
        """Whether ``pages`` hold the first of ``tokens``."""
        known = self._tokens_of[list(pages)].ravel()
        return bool((known == tokens[: known.size]).all())

    def match(self, hashes: Sequence[bytes], tokens: Tokens) -> list[int]:
        """The pages of the longest prefix in the index, in order; O(pages matched)."""
        pages = self.find(hashes)
        if not pages:
            return pages
        known = self._tokens_of[pages]  # a copy [pages, page_size]
        other = np.flatnonzero(known.ravel() != tokens[: known.size])
        return pages[: other[0] // known.shape[1]] if len(other) else pages

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest prefix by their hashes alone, for who reads none of them."""
        pages: list[int] = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def add(
        self,
        page: int,
        page_hash: bytes,
        tokens: Tokens,
        parent: bytes | None = None,
        keys: tuple[str, ...] = (),
    ) -> bool:
        """Adds a full page, or returns False if another page with its tokens is in the index.

        Args:
            parent, keys: the hash of the page before it, and the extra keys of its chain.
        """
        if page_hash in self._page_of:
            return False
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        self._tokens_of[page] = tokens
        self._before[page] = parent, keys
        # Here, where its tokens are at hand.
        self._named[page] = page_hash, self._tokens_of[page].tobytes(), parent, keys
        self._dropped.pop(page, None)
        if self.observer is not None:
            self.observer.stored(page_hash, parent, tokens, keys)
        return True

    def name(self, page: int) -> PageName | None:
        """Returns what a page holds; None if it is not in the index."""
        page_hash = self._hash_of[page]
        if page_hash is None:
            return None
        return PageName(page_hash, self._tokens_of[page].tobytes(), *self._before[page])

    def drop(self, page: int, *, keeps: bool = False) -> bool:
        """Removes a page, for instance before it is overwritten; False if it was not there.

        Args:
            keeps: the page holds the same until a transfer writes there, so it keeps its name.
        """
        page_hash = self._hash_of[page]
        if page_hash is None:
            return False
        del self._page_of[page_hash]
        self._hash_of[page] = None
        if self._named.pop(page, None) is not None or not keeps:
            self._dropped[page] = None
        if self.observer is not None:
            self.observer.removed(page_hash)
        return True

    def changes(self) -> NameChanges | None:
        """What has changed since the last call; None: nothing."""
        if not (self._named or self._dropped):
            return None
        changes = NameChanges(self._named, list(self._dropped))
        self._named, self._dropped = {}, {}
        return changes

    def clear(self) -> None:
        """Removes all pages, whose memory is gone."""
        observer, self.observer = self.observer, None
        for page in list(self._page_of.values()):
            self.drop(page)
        self.observer = observer
        if observer is not None:
            observer.cleared()

    def check_integrity(self) -> None:
        """Checks in O(pages) that both directions agree.

        Raises:
            CacheError: A rule is broken; the message names the first one.
        """
        for page, page_hash in enumerate(self._hash_of):
            if page_hash is not None and self._page_of.get(page_hash) != page:
                raise CacheError(f"page {page} is known, and cannot be found")
        if len(self._page_of) != sum(page_hash is not None for page_hash in self._hash_of):
            raise CacheError("a page that is not known can be found")
