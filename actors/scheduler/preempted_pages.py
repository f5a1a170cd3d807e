"""What becomes of a preempted request's pages: they are freed, or kept in host memory.

    preempt:   pages  ──SWAP_OUT──► host pages   (as many as hold tokens that need not be computed)
    admit:     prefix hits, then ◄──SWAP_IN── host pages, then new pages

Recomputing costs arithmetic, swapping costs two copies: the choice that the PagedAttention paper
describes (Kwon et al., 2023, section 4.5). A request is recomputed if host pages are short.
"""

from dataclasses import dataclass
from typing import Protocol

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import SWAP_IN, SWAP_OUT
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import SchedulerState
from rayfin.cache.errors import CacheError
from rayfin.cache.page_tables import PageTables


class PreemptionPolicy(Protocol):
    """``Lifecycle``'s hook, called when a request loses its pages and when it gets pages again."""

    @property
    def num_held(self) -> int:
        """Host pages in use."""
        ...

    def keep(self, slot: int) -> None:
        """The slot's request is preempted; its pages are freed right after this call."""
        ...

    def num_saved(self, request: Request) -> int:
        """Tokens of the waiting request that need not be computed again."""
        ...

    def restore(self, slot: int, num_cached_pages: int) -> None:
        """The slot's request is admitted with all its pages, the first of them cached."""
        ...

    def forget(self, request: Request) -> None:
        """The request ends while it waits."""
        ...

    def clear(self) -> None:
        """Forgets all saved pages: the runners are new."""
        ...

    def check_integrity(self) -> None:
        """Checks the accounting of host pages.

        Raises:
            CacheError: an invariant is broken.
        """
        ...


class Recompute:
    """Keeps nothing: prompt and output are computed again, except for prefix cache hits."""

    @property
    def num_held(self) -> int:
        return 0

    def keep(self, slot: int) -> None: ...

    def num_saved(self, request: Request) -> int:
        return 0

    def restore(self, slot: int, num_cached_pages: int) -> None: ...

    def forget(self, request: Request) -> None: ...

    def clear(self) -> None: ...

    def check_integrity(self) -> None: ...


@dataclass(slots=True, frozen=True)
class _Saved:
    """The host pages of a waiting request."""

    pages: list[int]  # host pages, in the order of its table
    num_tokens: int  # in them


class Swap:
    """Keeps pages of preempted requests in pages of ``host`` memory, while they last.

    Only tokens before the last known one are saved: the last is computed again for its logits. They
    were written by steps whose results are here, or by steps that run before the move.

    Beam searches are always recomputed, since they start again from their prompt. So are requests
    whose prompt log probabilities are incomplete, since those of steps in flight are dropped, and
    those whose vector takes all of their tokens.
    """

    def __init__(self, host: PageTables, state: SchedulerState) -> None:
        self._host = host
        self._running = state.running
        self._tables = state.tables
        self._moves = state.moves
        self._counters = state.counters
        self._saved: dict[Request, _Saved] = {}

    @property
    def num_held(self) -> int:
        return sum(len(saved.pages) for saved in list(self._saved.values()))

    def keep(self, slot: int) -> None:
        running, tables = self._running, self._tables
        request = running.request(slot)
        if request.source.beams is not None or request.scoring or request.computes_all:
            return
        num_tokens = min(int(running.num_computed[slot]), int(running.num_known[slot]) - 1)
        count = tables.pages_for(num_tokens)
        pages = self._host.lend_new(count) if count else None
        if pages is None:
            return
        self._saved[request] = _Saved(pages, num_tokens)
        self._moves.add(SWAP_OUT, tables.pages_since(slot, 0)[:count], pages)
        self._counters.preemptions_by_swap += 1
        self._counters.swapped_out += count

    def num_saved(self, request: Request) -> int:
        saved = self._saved.get(request)
        return 0 if saved is None else saved.num_tokens

    def restore(self, slot: int, num_cached_pages: int) -> None:
        saved = self._saved.pop(self._running.request(slot), None)
        if saved is None:
            return
        self._free(saved)
        sources = saved.pages[num_cached_pages:]
        if sources:
            targets = self._tables.pages_since(slot, num_cached_pages)[: len(sources)]
            self._moves.add(SWAP_IN, sources, targets)
            self._running.num_computed[slot] = saved.num_tokens
            self._counters.swapped_in += len(sources)

    def forget(self, request: Request) -> None:
        if saved := self._saved.pop(request, None):
            self._free(saved)

    def clear(self) -> None:
        for saved in self._saved.values():
            self._free(saved)
        self._saved.clear()

    def check_integrity(self) -> None:
        self._host.check_integrity()
        for request, saved in self._saved.items():
            if request.slot is not None or request.ended:
                raise CacheError(f"host pages of a request that does not wait: {saved.pages}")
            if len(saved.pages) != self._tables.pages_for(saved.num_tokens):
                raise CacheError(f"{saved.num_tokens} tokens in host pages {saved.pages}")
            if saved.num_tokens >= request.num_tokens:
                raise CacheError(f"{saved.num_tokens} of {request.num_tokens} tokens are saved")

    def _free(self, saved: _Saved) -> None:
        # Moves from them may still be pending; moves to them by a later request come after those.
        self._host.give_back(saved.pages)


def make_preemption(config: EngineConfig, state: SchedulerState) -> PreemptionPolicy:
    """Swapping where the engine has host pages, else recomputation."""
    if state.host is None or not config.num_host_pages:
        return Recompute()
    return Swap(state.host, state)
