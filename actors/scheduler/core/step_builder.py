"""Turns the decision of a scheduler (which slots, how many tokens each) into a SchedulerInfo."""

from dataclasses import dataclass

import numpy as np

from rayfin.actors.messages import (
    NO_TOKEN,
    SAMPLED_LAST_STEP,
    BoolArray,
    Int32Array,
    Int64Array,
    SchedulerInfo,
)
from rayfin.actors.scheduler.core.scheduler_state import SchedulerState


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


@dataclass(slots=True, frozen=True)
class _Shape:
    """The columns of a SchedulerInfo that say how its rows lie; shared, never written to."""

    chunk_idx: Int32Array  # [R]
    chunk_len: Int32Array  # [R]
    last_pos: Int32Array  # [R]
    is_decoding: BoolArray  # [R]


class StepBuilder:
    """Builds one step after another; advances the requests' counters as it does.

    Counters advance when a step is scheduled, not when its result comes, so that the next step can
    be scheduled from counts alone (asynchronous scheduling).
    """

    def __init__(self, state: SchedulerState) -> None:
        self.epoch = 0
        self._state = state
        self._step = 0
        self._shapes: dict[int, _Shape] = {}  # by rows, of steps that only decode
        self._told: Int32Array = np.zeros_like(state.tables.held)  # pages the runners know

    def restart(self, epoch: int) -> None:
        """From now on steps are for a new group of runners."""
        self.epoch = epoch
        self._step = 0
        self._told[:] = 0

    def build(
        self, decoding: Int64Array, chunks: list[Chunk], num_steps: int = 1
    ) -> StepRecord | None:
        """The step that gives each slot of ``decoding`` [D] one token, then runs the chunks.

        A ``num_steps`` over 1 goes with no chunks; it gives each slot up to so many tokens.

        Returns:
            The step; None if it would be empty: then news and page moves wait for the next one.
        """
        if not len(decoding) and not chunks:
            return None
        running, tables = self._state.running, self._state.tables
        slots = decoding
        if chunks:
            slots = np.concatenate([decoding, np.array([c.slot for c in chunks], np.int64)])
        new_requests, finished = self._state.runner_diff.drain(slots.tolist())
        if new_requests:
            self._told[[new.handle for new in new_requests]] = 0
        kv_len, held = running.num_computed[slots], tables.held[slots]
        shape = self._decode_shape(len(decoding))
        if chunks:
            shape = self._mixed_shape(slots, kv_len, decoding, chunks)
        new_pages_len = held - self._told[slots]
        info = SchedulerInfo(
            epoch=self.epoch,
            step=self._step,
            ids=slots.astype(np.int32),
            chunk_idx=shape.chunk_idx,
            chunk_len=shape.chunk_len,
            merge_prompt=self._merge(decoding, kv_len[: len(decoding)], chunks),
            kv_len=kv_len.astype(np.int32),
            kv_page_len=held,
            last_pos=shape.last_pos,
            is_decoding=shape.is_decoding,
            decoding_batch=len(decoding),
            prefill_batch=len(chunks),
            new_pages=self._pages(slots, new_pages_len),
            new_pages_len=new_pages_len,
            new_requests=new_requests,
            finished=finished,
            num_steps=num_steps,
            moves=self._state.moves.drain(),
        )
        self._advance(slots, shape, len(decoding), num_steps)
        self._told[slots] = held
        self._step += 1
        return StepRecord(info, slots, running.admission[slots])

    def _decode_shape(self, rows: int) -> _Shape:
        """Of a step that only decodes: the same for every such step of so many rows."""
        if (shape := self._shapes.get(rows)) is None:
            zeros = np.zeros(rows, np.int32)
            shape = _Shape(
                chunk_idx=np.arange(rows, dtype=np.int32),
                chunk_len=zeros + np.int32(1),
                last_pos=zeros,
                is_decoding=np.ones(rows, np.bool_),
            )
            self._shapes[rows] = shape
        return shape

    def _mixed_shape(
        self, slots: Int64Array, kv_len: Int64Array, decoding: Int64Array, chunks: list[Chunk]
    ) -> _Shape:
        running = self._state.running
        lengths = np.ones(len(slots), np.int32)
        lengths[len(decoding) :] = [chunk.length for chunk in chunks]
        ends_prompt = kv_len + lengths == running.num_known[slots] + running.num_pending[slots]
        return _Shape(
            chunk_idx=(np.cumsum(lengths) - lengths).astype(np.int32),
            chunk_len=lengths,
            last_pos=np.where(ends_prompt, lengths - 1, NO_TOKEN).astype(np.int32),
            is_decoding=np.arange(len(slots)) < len(decoding),
        )

    def _advance(self, slots: Int64Array, shape: _Shape, decoding: int, num_steps: int) -> None:
        """The counters, once the step has run."""
        running = self._state.running
        if num_steps > 1:
            granted = np.minimum(num_steps, running.room(slots))
            running.num_computed[slots] += granted
            running.num_pending[slots] += granted
            return
        running.num_computed[slots] += shape.chunk_len
        sampling = shape.last_pos >= 0
        running.num_pending[slots] += sampling
        if len(slots) > decoding:
            running.start_decoding(slots[decoding:][sampling[decoding:]].tolist())

    def _merge(self, decoding: Int64Array, computed: Int64Array, chunks: list[Chunk]) -> Int32Array:
        """All chunks in one string; a token that no result has shown yet is a placeholder."""
        running = self._state.running
        known = computed < running.num_known[decoding]
        own = np.where(known, running.tokens[decoding, computed], np.int32(SAMPLED_LAST_STEP))
        if not chunks:
            return own
        parts = [own]
        for chunk in chunks:
            start = int(running.num_computed[chunk.slot])
            parts.append(running.tokens[chunk.slot, start : start + chunk.length])
        return np.concatenate(parts)

    def _pages(self, slots: Int64Array, new_pages_len: Int32Array) -> Int32Array:
        rows = np.flatnonzero(new_pages_len)
        told = self._told[slots[rows]].tolist()
        pages: list[int] = []
        for slot, count in zip(slots[rows].tolist(), told, strict=True):
            pages += self._state.tables.pages_since(slot, count)
        return np.array(pages, np.int32)
