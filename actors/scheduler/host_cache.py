"""Pages that leave the runners' cache, in the memory of their host (``--kv-offloading-size``).

    a page is allocated again:  what it holds ──SWAP_OUT──► a host page, before a step writes there
    a request comes:            host pages ──read──► pages that are lent, then in the index

Host pages are lent while they are read. Those used longest ago leave first, of a prompt its end.
"""

from collections.abc import Sequence

import numpy as np

from rayfin.actors.messages import HOST, SWAP_OUT
from rayfin.actors.scheduler.scheduler_state import SchedulerState
from rayfin.cache.page_tables import PageTables
from rayfin.cache.prefix_index import PrefixIndex, Tokens


class HostCache:
    """Stores pages of the prefix index that are evicted in pages of ``host``, and finds them."""

    def __init__(
        self,
        host: PageTables,
        host_index: PrefixIndex,
        index: PrefixIndex,
        state: SchedulerState,
        page_bytes: int,
    ) -> None:
        self._host, self._host_index, self._index = host, host_index, index
        self._moves, self._counters = state.moves, state.counters
        self._page_bytes = page_bytes
        state.tables.evicting = self._store

    def match(self, hashes: Sequence[bytes], tokens: Tokens) -> list[int]:
        """Finds the host pages of the first of ``hashes``; ``tokens`` are those in these pages."""
        return self._host_index.match(hashes, tokens)

    def lend(self, pages: Sequence[int]) -> None:
        """Holds host pages, so that they keep their content until ``give_back``."""
        self._host.lend(pages)

    def give_back(self, pages: Sequence[int], lost: Sequence[int] = ()) -> None:
        """Ends a loan; those that are ``lost`` hold something else."""
        for page in lost:
            self._host_index.drop(page)
        self._host.give_back(pages)

    def clear(self) -> None:
        """Forgets all pages."""
        self._host.reset_prefix_cache()

    def _store(self, pages: Sequence[int]) -> None:
        for page in pages:
            if (name := self._index.name(page)) is None:
                continue
            there = self._host_index.page(name.page_hash)
            if there is not None:  # it was read from there, and is used now
                taken = [there]
                self._host.lend(taken)
            elif (new := self._host.lend_new(1)) is not None:
                taken = new
                tokens = np.frombuffer(name.tokens, np.int32)
                self._host_index.add(new[0], name.page_hash, tokens, name.parent, name.keys)
                self._moves.add(SWAP_OUT, [page], new)
                self._counters.page_bytes[HOST, "written"] += self._page_bytes
            else:
                return
            self._host.give_back(taken)


def make_host_cache(state: SchedulerState, page_bytes: int) -> HostCache | None:
    """The host's share of the prefix cache; None if it has none."""
    host, index = state.host, state.tables.index
    if host is None or host.index is None or index is None:
        return None
    return HostCache(host, host.index, index, state, page_bytes)
