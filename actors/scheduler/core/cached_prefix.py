"""Where an admission starts: with nothing, with pages of the prefix index, or beside a sibling.

The choices of one prompt (``n`` > 1) are siblings: all but the first name it as their elder. One
that is admitted while its elder runs *forks* from it: it shares the prompt's full pages, gets a
copy of the page in which the prompt's last token lies, and computes that token only (copy-on-write
of vLLM's paper, arXiv:2309.06180). That needs no prefix index.

A sibling waits while its elder is in the middle of their prompt. The wait is bounded: an elder that
holds a slot in its prompt gets at least a token of every step until it is through (decoding rows
never fill a step's tokens, since the elder's slot is not among them), and one that holds none, be
it preempted, aborted, failed or done, is not waited for: then the sibling is admitted like any
other request.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import COPY, EngineRequest
from rayfin.actors.scheduler.core.scheduler_state import SchedulerState
from rayfin.actors.scheduler.state.request import Request


@dataclass(slots=True, frozen=True)
class CachedPrefix:
    """What of a request's tokens is in the cache already, before it is admitted."""

    pages: list[int]  # full ones, to be shared with whoever holds them
    num_tokens: int
    fork_parent: int | None = None  # the slot to fork from


class PrefixLookup:
    """Finds and makes the starts of admissions."""

    def __init__(self, state: SchedulerState) -> None:
        self._running = state.running
        self._tables = state.tables
        self._moves = state.moves
        self._runner_diff = state.runner_diff

    def find(self, request: Request) -> CachedPrefix | None:
        """The most that is to be had for the waiting request; None: its elder is about to have it.

        The elder must have it from steps before the next one, since page copies are made before
        everything else of a step; one that is new in the next step may share pages of the index
        that are computed in just that step.
        """
        size = self._tables.page_size
        hits = self._hits(request)
        found = CachedPrefix(hits, len(hits) * size)
        prompt_less_one = len(request.source.prompt) - 1
        fork_parent = _fork_source(request)
        if fork_parent is None or found.num_tokens >= prompt_less_one:
            return found
        if (
            fork_parent in self._runner_diff
            or self._running.num_computed[fork_parent] < prompt_less_one
        ):
            return None
        pages = self._tables.pages_since(fork_parent, 0)[: prompt_less_one // size]
        return CachedPrefix(pages, prompt_less_one, fork_parent)

    def _hits(self, request: Request) -> list[int]:
        """Pages of the prefix index; none while the prompt itself has yet to be scored."""
        return [] if request.scoring else self._tables.match(request.chain, request.tokens())

    def make(self, start: CachedPrefix, slot: int) -> None:
        """The slot's empty page table begins with it."""
        if start.fork_parent is None:
            self._tables.share(slot, start.pages)
            return
        copies = self._tables.fork(start.fork_parent, slot, start.num_tokens)
        assert copies is not None, "admitted without pages"
        for page, copy in copies:
            self._moves.add(COPY, [page], [copy])


def find_fork_parent(
    source: EngineRequest, live: Mapping[tuple[str, int], Request]
) -> Request | None:
    """The choice that ``source`` names as its elder, if that lives; ``live`` is by (client, key).

    Raises:
        InvalidRequest: it is a choice of another prompt, or of other ``extra_keys``.
    """
    if source.parent_key is None:
        return None
    fork_parent = live.get((source.client, source.parent_key))
    if fork_parent is not None:
        same_prompt = np.array_equal(fork_parent.source.prompt, source.prompt)
        if not same_prompt or fork_parent.source.extra_keys != source.extra_keys:
            raise InvalidRequest("siblings must be choices of one prompt", "prompt")
    return fork_parent


def _fork_source(request: Request) -> int | None:
    """The slot of the elder, at a first admission that may skip the prompt; else None."""
    if request.fork_parent is None or request.admitted:
        return None
    if request.source.sampling.prompt_logprobs is not None:
        return None
    return request.fork_parent.slot
