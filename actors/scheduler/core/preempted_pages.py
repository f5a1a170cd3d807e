"""What becomes of a preempted request's pages: thrown away, or kept in host memory.

    preempt:   pages  ──SWAP_OUT──► host pages   (as many as hold tokens that need not be computed)
    admit:     prefix hits, then ◄──SWAP_IN── host pages, then new pages

Recomputing costs arithmetic, swapping costs the way to host memory and back: the choice that the
PagedAttention paper describes (Kwon et al., 2023, section 4.5). Where host pages are short, a
request is recomputed after all.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import SWAP_IN, SWAP_OUT
from rayfin.actors.scheduler.core.scheduler_state import SchedulerState
from rayfin.actors.scheduler.state.request import Request
from rayfin.cache.errors import CacheError
from rayfin.cache.page_pool import PagePool


class PreemptionPolicy(Protocol):
    """``Lifecycle``'s hook: hears of every request that loses its pages, and gets them back."""

    @property
    def num_held(self) -> int:
        """Host pages in use."""
        ...

    def keep(self, slot: int) -> None:
        """The slot's request is preempted: its pages are given back right after this."""
        ...

    def num_saved(self, request: Request) -> int:
        """Tokens of the waiting request that need not be computed again."""
        ...

    def restore(self, slot: int, num_found: int) -> None:
        """The slot's request is admitted again, with all its pages; ``num_found`` are cached."""
        ...

    def forget(self, request: Request) -> None:
        """The request ends while it waits."""
        ...

    def clear(self) -> None:
        """The runners are new: host memory is empty."""
        ...

    def check_integrity(self) -> None:
        """Host pages add up.

        Raises:
            CacheError: an invariant is broken.
        """
        ...


class Recompute:
    """Keeps nothing: prompt and output are computed again, but for what the prefix index knows."""

    @property
    def num_held(self) -> int:
        return 0

    def keep(self, slot: int) -> None: ...

    def num_saved(self, request: Request) -> int:
        return 0

    def restore(self, slot: int, num_found: int) -> None: ...

    def forget(self, request: Request) -> None: ...

    def clear(self) -> None: ...

    def check_integrity(self) -> None: ...


@dataclass(slots=True, frozen=True)
class _Saved:
    """What host memory holds of a waiting request."""

    pages: list[int]  # host pages, in the order of its table
    num_tokens: int  # in them


class Swap:
    """Keeps the pages of preempted requests in ``num_pages`` of host memory, while there is room.

    A request's last known token is computed again whatever is saved, since its logits are wanted,
    so only the tokens before it count: those were written by steps whose results are here, or by
    steps that run before the move. A page that holds none of them stays behind.

    Some requests are recomputed whatever room there is: a beam search starts again from its prompt,
    and what steps in flight tell of a prompt's log probabilities is dropped.
    """

    def __init__(self, num_pages: int, state: SchedulerState) -> None:
        self._pool = PagePool(num_pages)
        self._running = state.running
        self._tables = state.tables
        self._moves = state.moves
        self._counters = state.counters
        self._saved: dict[Request, _Saved] = {}

    @property
    def num_held(self) -> int:
        return self._pool.num_pages - self._pool.num_free

    def keep(self, slot: int) -> None:
        running, tables = self._running, self._tables
        request = running.request(slot)
        if request.source.beams is not None or request.scoring:
            return
        num_tokens = min(int(running.num_computed[slot]), int(running.num_known[slot]) - 1)
        count = tables.pages_for(num_tokens)
        pages = self._pool.allocate(count) if count else None
        if pages is None:
            return
        self._saved[request] = _Saved(pages, num_tokens)
        self._moves.add(SWAP_OUT, tables.pages_since(slot, 0)[:count], pages)
        self._counters.preemptions_by_swap += 1
        self._counters.swapped_out += count

    def num_saved(self, request: Request) -> int:
        saved = self._saved.get(request)
        return 0 if saved is None else saved.num_tokens

    def restore(self, slot: int, num_found: int) -> None:
        saved = self._saved.pop(self._running.request(slot), None)
        if saved is None:
            return
        self._give_back(saved)
        sources = saved.pages[num_found:]
        if sources:
            targets = self._tables.pages_since(slot, num_found)[: len(sources)]
            self._moves.add(SWAP_IN, sources, targets)
            self._running.num_computed[slot] = saved.num_tokens
            self._counters.swapped_in += len(sources)

    def forget(self, request: Request) -> None:
        if saved := self._saved.pop(request, None):
            self._give_back(saved)

    def clear(self) -> None:
        for saved in self._saved.values():
            self._give_back(saved)
        self._saved.clear()

    def check_integrity(self) -> None:
        self._pool.check_integrity(
            Counter(page for saved in self._saved.values() for page in saved.pages)
        )
        for request, saved in self._saved.items():
            if request.slot is not None or request.ended:
                raise CacheError(f"host pages of a request that does not wait: {saved.pages}")
            if len(saved.pages) != self._tables.pages_for(saved.num_tokens):
                raise CacheError(f"{saved.num_tokens} tokens in host pages {saved.pages}")
            if saved.num_tokens >= request.num_tokens:
                raise CacheError(f"{saved.num_tokens} of {request.num_tokens} tokens are saved")

    def _give_back(self, saved: _Saved) -> None:
        """Frees host pages, in order, so that they are taken, and copied, in strings of ids.

        Moves from them may still be on their way; whoever takes them moves something there later.
        """
        for page in saved.pages:
            self._pool.free(page)


def make_preemption(config: EngineConfig, state: SchedulerState) -> PreemptionPolicy:
    """Swapping where the engine has host pages, else recomputation."""
    return Swap(config.num_host_pages, state) if config.num_host_pages else Recompute()
