"""Beam searches in the engine: one request, as many slots as beams, in lockstep.

    admit       one slot computes the prompt, the others are reserved
    result      ``BeamSearch`` decides which beams go on with which tokens
    reassign    a beam's first child keeps its slot; each other child takes a slot that no beam
                needs, and forks: full pages shared, the last one copied
    next step   feeds each slot its token, which is known here: a beam's row has no placeholder

A slot in lockstep decodes only known tokens, so the group's next step waits for its last result,
while other rows continue with two steps in flight. To the runner a forked beam is a new request
whose tokens are in the cache already.

After a preemption or on new runners, a search starts again from its prompt with the same result,
since it is deterministic. An error of one of its rows, an abort or a deadline ends all of it:
``Lifecycle`` frees all slots of a request together.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rayfin.actors.config import EngineConfig
from rayfin.actors.errors import ContextLengthExceeded, InvalidRequest
from rayfin.actors.messages import (
    COPY,
    STATE_COPY,
    EngineRequest,
    Logprobs,
    Sampling,
    StepResult,
)
from rayfin.actors.scheduler.beam_search import BeamSearch, candidates_per_beam
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.step_builder import StepRecord


def as_it_runs(source: EngineRequest, config: EngineConfig) -> EngineRequest:
    """Returns the request as the runners see it: greedy rows with enough log probabilities.

    Raises:
        InvalidRequest: it has more beams than a step has rows.
        ContextLengthExceeded: it needs more pages than there are.
    """
    assert source.beams is not None
    width, rows = source.beams.width, config.limits.max_decoding_batch
    if width > rows:
        raise InvalidRequest(
            f"a beam search of width {width} takes {width} rows of a step, of at most {rows}", "n"
        )
    size, prompt = config.page_size, len(source.prompt)
    shared = prompt // size
    longest = prompt + max(1, source.stopping.max_tokens - 1)  # the last token is never cached
    pages = config.pages_of(shared) + width * config.pages_of(-(-longest // size) - shared)
    if pages > config.num_pages:
        raise ContextLengthExceeded(
            f"a beam search of width {width} over a prompt of {prompt} tokens and up to "
            f"{source.stopping.max_tokens} more takes up to {pages} cache pages of {size} tokens, "
            f"of {config.num_pages}",
            "n",
        )
    candidates = candidates_per_beam(width, len(source.stopping.stop_token_ids))
    sampling = Sampling(seed=source.sampling.seed, logprobs=min(candidates, config.vocab_size))
    return replace(source, sampling=sampling, output=[])


class BeamGroups:
    """Advances the beam searches with each result. ``Request.search`` holds them."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def apply(self, record: StepRecord, result: StepResult) -> list[Request]:
        """Applies the rows of live beams; a step with beams is never multi-step.

        Returns:
            Requests whose searches are over.
        """
        running = self._lifecycle.state.running
        current = running.admission[record.slots] == record.admissions
        sampled = current & running.lockstep[record.slots] & (result.tokens[:, 0] >= 0)
        rows = np.flatnonzero(sampled).tolist()
        if not rows:
            return []
        self._lifecycle.state.waiting.sampled(record.slots[rows])
        assert result.logprobs is not None
        width = result.tokens.shape[1]  # over 1 if rows beside the beams have drafts
        places = enumerate(result.logprobs.at.tolist())
        index_of_row = {at // width: index for index, at in places if at % width == 0}
        index_of = {int(record.slots[row]): index_of_row[row] for row in rows}  # by slot
        over = []
        for request in dict.fromkeys(running.request(slot) for slot in index_of):
            # An earlier one of the loop may have preempted this one.
            if request.slot is not None and self._advance(request, index_of, result.logprobs):
                over.append(request)
        return over

    def _advance(self, request: Request, index_of: dict[int, int], logprobs: Logprobs) -> bool:
        """Advances one search by a step; returns whether it is over."""
        source = request.source
        assert source.beams is not None
        search = request.search
        if search is None:
            stopping = source.stopping
            search = BeamSearch(source.beams, stopping.stop_token_ids, stopping.max_tokens)
            request.search = search
        beams = request.slots[: len(search.beams)]
        self._lifecycle.state.waiting.sampled(np.array(beams, np.int64))
        at = [index_of[slot] for slot in beams]
        count = source.sampling.logprobs
        step = search.advance(logprobs.ids[at, :count], logprobs.values[at, :count])
        if not search.over:
            self._reassign(request, step.parents, step.tokens)
        return search.over

    def _reassign(self, request: Request, parents: list[int], tokens: list[int]) -> None:
        """Puts the beams into the request's first slots, in order, each with its next token.

        Preempts the last request in order if pages run out; returns early if that is this one.
        """
        lifecycle = self._lifecycle
        running, tables = lifecycle.state.running, lifecycle.state.tables
        slots, forks = assign(parents, request.slots)
        for slot in slots[len(parents) :] + [target for _, target in forks]:
            lifecycle.vacate(slot)
            running.empty(slot)
        for source, target in forks:
            length = int(running.num_computed[source])
            while (copies := tables.fork(source, target, length)) is None:
                lifecycle.preempt(lifecycle.victim())
                if request.slot is None:
                    return
            for page, copy in copies:
                lifecycle.state.moves.add(COPY, [page], [copy])
            if lifecycle.state.recurrent:
                lifecycle.state.moves.add(STATE_COPY, [source], [target])
            running.copy(source, target)
            lifecycle.introduce(target)
        request.slots[:] = slots
        running.append(np.array(slots[: len(parents)], np.int64), np.array(tokens, np.int32))


def assign(parents: Sequence[int], slots: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Assigns a slot to each child; beam i is in ``slots[i]``, and the last slots may be empty.

    Returns:
        The slots in the children's order, then the unused ones; and (from, to) of each fork.
    """
    taken = {slots[parent] for parent in parents}
    free = [slot for slot in slots if slot not in taken]
    children: list[int] = []
    forks: list[tuple[int, int]] = []
    for parent in parents:
        if slots[parent] in children:
            forks.append((slots[parent], free.pop()))
            children.append(forks[-1][1])
        else:
            children.append(slots[parent])
    return children + free, forks
