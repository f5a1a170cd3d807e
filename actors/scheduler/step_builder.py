"""Turns the decision of a scheduler (which slots, how many tokens each) into a SchedulerInfo."""

from dataclasses import dataclass

import numpy as np

from rayfin.actors.messages import (
    NO_TOKEN,
    SAMPLED_LAST_STEP,
    Int32Array,
    Int64Array,
    SchedulerInfo,
)
from rayfin.actors.scheduler.lifecycle import Lifecycle


@dataclass(slots=True, frozen=True)
class Chunk:
    """``length`` tokens of one slot's prompt, from where it stands."""

    slot: int
    length: int


@dataclass(slots=True, frozen=True)
class StepRecord:
    """What the scheduler must remember of a step until its result comes."""

    info: SchedulerInfo
    slots: Int64Array  # [R]
    admissions: Int64Array  # [R] who held each slot then: results for anyone else are dropped


class StepBuilder:
    """Builds one step after another; advances the requests' counters as it does.

    Counters advance when a step is scheduled, not when its result comes, so that the next step can
    be scheduled from counts alone (asynchronous scheduling).
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.epoch = 0
        self._lifecycle = lifecycle
        self._step = 0
        self._told: Int32Array = np.zeros_like(lifecycle.tables.held)  # pages the runners know

    def restart(self, epoch: int) -> None:
        """From now on steps are for a new group of runners."""
        self.epoch = epoch
        self._step = 0
        self._told[:] = 0

    def build(self, decoding: Int64Array, chunks: list[Chunk], lease: int = 1) -> StepRecord | None:
        """The step that gives each slot of ``decoding`` [D] one token, then runs the chunks.

        A ``lease`` over 1 goes with no chunks; it gives each slot up to so many tokens.

        Returns:
            The step; None if it would be empty: then news and page moves wait for the next one.
        """
        if not len(decoding) and not chunks:
            return None
        running, tables = self._lifecycle.running, self._lifecycle.tables
        slots = np.concatenate([decoding, np.array([c.slot for c in chunks], np.int64)])
        new_requests, finished = self._lifecycle.news.take(slots.tolist())
        self._told[[new.handle for new in new_requests]] = 0
        lengths = np.ones(len(slots), np.int32)
        lengths[len(decoding) :] = [chunk.length for chunk in chunks]
        kv_len = running.num_computed[slots]
        ends_prompt = kv_len + lengths == running.num_known[slots] + running.num_pending[slots]
        new_pages_len = tables.held[slots] - self._told[slots]
        info = SchedulerInfo(
            epoch=self.epoch,
            step=self._step,
            ids=slots.astype(np.int32),
            chunk_idx=(np.cumsum(lengths) - lengths).astype(np.int32),
            chunk_len=lengths,
            merge_prompt=self._merge(decoding, chunks),
            kv_len=kv_len.astype(np.int32),
            kv_page_len=tables.held[slots],
            last_pos=np.where(ends_prompt, lengths - 1, NO_TOKEN).astype(np.int32),
            is_decoding=np.arange(len(slots)) < len(decoding),
            decoding_batch=len(decoding),
            prefill_batch=len(chunks),
            new_pages=self._pages(slots, new_pages_len),
            new_pages_len=new_pages_len,
            new_requests=new_requests,
            finished=finished,
            lease=lease,
            moves=self._lifecycle.moves.take(),
        )
        if lease == 1:
            running.num_computed[slots] += lengths
            running.num_pending[slots] += ends_prompt
        else:
            granted = np.minimum(lease, running.room(slots))
            running.num_computed[slots] += granted
            running.num_pending[slots] += granted
        running.start_decoding(slots[len(decoding) :][ends_prompt[len(decoding) :]].tolist())
        self._told[slots] = tables.held[slots]
        self._step += 1
        return StepRecord(info, slots, running.admission[slots])

    def _merge(self, decoding: Int64Array, chunks: list[Chunk]) -> Int32Array:
        """All chunks in one string; a token that no result has shown yet is a placeholder."""
        running = self._lifecycle.running
        computed = running.num_computed[decoding]
        known = computed < running.num_known[decoding]
        parts = [np.where(known, running.tokens[decoding, computed], SAMPLED_LAST_STEP)]
        for chunk in chunks:
            start = int(running.num_computed[chunk.slot])
            parts.append(running.tokens[chunk.slot, start : start + chunk.length])
        return np.concatenate(parts).astype(np.int32)

    def _pages(self, slots: Int64Array, new_pages_len: Int32Array) -> Int32Array:
        pages: list[int] = []
        for row in np.flatnonzero(new_pages_len).tolist():
            slot = int(slots[row])
            pages += self._lifecycle.tables.pages_since(slot, int(self._told[slot]))
        return np.array(pages, np.int32)
