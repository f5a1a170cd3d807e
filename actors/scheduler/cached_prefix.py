"""What an admission need not compute: pages of the prefix index, or a fork of the same prompt.

The choices of one prompt (``n`` > 1) name the first one as their fork parent. A choice that is
admitted while its parent runs *forks* from it: it shares the prompt's full pages, gets a copy of
the page with the prompt's last token, and computes that token only (copy-on-write of vLLM's paper,
arXiv:2309.06180). Forks need no prefix index.

A choice waits while its parent computes their prompt. The wait is bounded: a parent with a slot
gets at least one prompt token of every step, since decoding rows never fill a step's tokens. A
parent without a slot (preempted, aborted, failed or finished) is not waited for; then the choice is
admitted like any other request.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import COPY, STATE_LOAD, EngineRequest
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import SchedulerState


@dataclass(slots=True, frozen=True)
class CachedPrefix:
    """The tokens of a waiting request that are in the cache already."""

    pages: list[int]  # full pages to share
    num_tokens: int
    fork_parent: int | None = None  # the slot to fork from


class PrefixLookup:
    """Finds cached prefixes of waiting requests, and enters them into page tables."""

    def __init__(self, state: SchedulerState) -> None:
        self._running = state.running
        self._tables = state.tables
        self._moves = state.moves
        self._runner_diff = state.runner_diff
        self._recurrent = state.recurrent
        self._snapshots = state.snapshots

    def find(self, request: Request) -> CachedPrefix | None:
        """Returns the longest cached prefix, or None if the fork parent still computes it."""
        size = self._tables.page_size
        hits = self._hits(request)
        indexed = CachedPrefix(hits, len(hits) * size)
        prompt_less_one = len(request.source.prompt) - 1
        fork_parent = _fork_source(request)
        if self._recurrent:  # a parent's own state stands behind the prompt
            return None if self._is_awaited(fork_parent, prompt_less_one) else indexed
        if fork_parent is None or indexed.num_tokens >= prompt_less_one:
            return indexed
        # Page copies run before all else of a step, so the parent's pages must come from earlier
        # steps. Shared pages of the index may be computed in the very step that shares them.
        if (
            fork_parent in self._runner_diff
            or self._running.num_computed[fork_parent] < prompt_less_one
        ):
            return None
        pages = self._tables.prefix_of(fork_parent, prompt_less_one // size)
        if pages is None:
            return indexed
        return CachedPrefix(pages, prompt_less_one, fork_parent)

    def _hits(self, request: Request) -> list[int]:
        """Pages of the prefix index; only those before the tokens that must be computed."""
        unscored = request.next_prompt_logprob - 1
        if (request.scoring and not unscored) or request.computes_all:
            return []
        tokens = request.tokens()
        if request.scoring:
            tokens = tokens[: unscored + 1]
        pages = self._tables.match(request.chain, tokens)
        if self._snapshots is None:
            return pages
        return pages[: self._snapshots.match(request.chain.hashes[: len(pages)])]

    def _is_awaited(self, fork_parent: int | None, prompt_less_one: int) -> bool:
        """Whether the parent is still to save the state that its other choices start from."""
        if fork_parent is None or self._snapshots is None:
            return False
        end = self._snapshots.last_end(prompt_less_one + 1)
        return end > 0 and self._running.num_computed[fork_parent] <= end

    def install(self, prefix: CachedPrefix, slot: int) -> None:
        """Puts the prefix at the start of the slot's empty page table."""
        if prefix.fork_parent is None:
            self._tables.share(slot, prefix.pages)
            if self._snapshots is not None:
                self._snapshots.latest[slot] = prefix.num_tokens
            if self._snapshots is not None and prefix.pages:
                chain = self._running.request(slot).chain
                snapshot = self._snapshots.find(chain.hashes[len(prefix.pages) - 1])
                self._moves.add(STATE_LOAD, [snapshot], [slot])
            return
        copies = self._tables.fork(prefix.fork_parent, slot, prefix.num_tokens)
        assert copies is not None, "admitted without pages"
        for page, copy in copies:
            self._moves.add(COPY, [page], [copy])


def find_fork_parent(
    source: EngineRequest, live: Mapping[tuple[str, int], Request]
) -> Request | None:
    """Returns the live choice that ``source`` names as its parent, or None.

    Args:
        live: requests by (client, key).

    Raises:
        InvalidRequest: the parent has another prompt or other ``prefix_keys``.
    """
    if source.parent_key is None:
        return None
    fork_parent = live.get((source.client, source.parent_key))
    if fork_parent is not None:
        same_prompt = np.array_equal(fork_parent.source.prompt, source.prompt)
        if not same_prompt or fork_parent.source.prefix_keys != source.prefix_keys:
            raise InvalidRequest("siblings must be choices of one prompt", "prompt")
    return fork_parent


def _fork_source(request: Request) -> int | None:
    """Returns the parent's slot if the first admission may skip the prompt, or None."""
    if request.fork_parent is None or request.admitted or request.fork_parent.mixed:
        return None
    if request.source.sampling.prompt_logprobs is not None:
        return None
    return request.fork_parent.slot
