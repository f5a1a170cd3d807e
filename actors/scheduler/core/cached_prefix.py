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
from rayfin.actors.scheduler.state.page_moves import PageMoves
from rayfin.actors.scheduler.state.request import Request
from rayfin.actors.scheduler.state.runner_diff import News
from rayfin.actors.scheduler.state.running_table import RunningTable
from rayfin.cache.page_tables import PageTables


@dataclass(slots=True, frozen=True)
class Start:
    """What of a request's tokens is in the cache already, before it is admitted."""

    pages: list[int]  # full ones, to be shared with whoever holds them
    num_tokens: int
    elder: int | None = None  # the slot to fork from


class Starts:
    """Finds and makes the starts of admissions."""

    def __init__(
        self, running: RunningTable, tables: PageTables, moves: PageMoves, news: News
    ) -> None:
        self._running = running
        self._tables = tables
        self._moves = moves
        self._news = news

    def find(self, request: Request) -> Start | None:
        """The most that is to be had for the waiting request; None: its elder is about to have it.

        The elder must have it from steps before the next one, since page copies are made before
        everything else of a step; one that is new in the next step may share pages of the index
        that are computed in just that step.
        """
        size = self._tables.page_size
        hits = self._hits(request)
        found = Start(hits, len(hits) * size)
        prompt_less_one = len(request.source.prompt) - 1
        elder = _fork_source(request)
        if elder is None or found.num_tokens >= prompt_less_one:
            return found
        if elder in self._news or self._running.num_computed[elder] < prompt_less_one:
            return None
        pages = self._tables.pages_since(elder, 0)[: prompt_less_one // size]
        return Start(pages, prompt_less_one, elder)

    def _hits(self, request: Request) -> list[int]:
        """Pages of the prefix index; none while the prompt itself has yet to be scored."""
        return [] if request.scoring else self._tables.match(request.chain, request.tokens())

    def make(self, start: Start, slot: int) -> None:
        """The slot's empty page table begins with it."""
        if start.elder is None:
            self._tables.adopt(slot, start.pages)
            return
        copies = self._tables.fork(start.elder, slot, start.num_tokens)
        assert copies is not None, "admitted without pages"
        for page, copy in copies:
            self._moves.add(COPY, [page], [copy])


def find_elder(source: EngineRequest, live: Mapping[tuple[str, int], Request]) -> Request | None:
    """The choice that ``source`` names as its elder, if that lives; ``live`` is by (client, key).

    Raises:
        InvalidRequest: it is a choice of another prompt, or of other ``extra_keys``.
    """
    if source.sibling_of is None:
        return None
    elder = live.get((source.client, source.sibling_of))
    if elder is not None:
        same_prompt = np.array_equal(elder.source.prompt, source.prompt)
        if not same_prompt or elder.source.extra_keys != source.extra_keys:
            raise InvalidRequest("siblings must be choices of one prompt", "prompt")
    return elder


def _fork_source(request: Request) -> int | None:
    """The slot of the elder, at a first admission that may skip the prompt; else None."""
    if request.elder is None or request.admitted:
        return None
    if request.source.sampling.prompt_logprobs is not None:
        return None
    return request.elder.slot
