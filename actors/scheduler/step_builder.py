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
from rayfin.actors.scheduler.scheduler_state import SchedulerState


@dataclass(slots=True, frozen=True)
class Chunk:
    """The next ``length`` tokens of one slot's prompt."""

    slot: int
    length: int


@dataclass(slots=True, frozen=True)
class StepRecord:
    """A step in flight, as its result is matched with it."""

    info: SchedulerInfo
    slots: Int64Array  # [R]
    admissions: Int64Array  # [R] results for other admissions are dropped


@dataclass(slots=True, frozen=True)
class _Shape:
    """The layout columns of a SchedulerInfo; shared between steps, never written to."""

    chunk_idx: Int32Array  # [R]
    chunk_len: Int32Array  # [R]
    last_pos: Int32Array  # [R]
    is_decoding: BoolArray  # [R]


class StepBuilder:
    """Builds steps, and advances the requests' counters.

    Counters advance when a step is scheduled, not when its result comes, so that the next step can
    be scheduled from counts alone (asynchronous scheduling).
    """

    def __init__(self, state: SchedulerState) -> None:
        self.epoch = 0
        self._state = state
        self._step = 0
        self._shapes: dict[int, _Shape] = {}  # by rows, of steps that only decode
        # Page table entries of each slot that the runners have.
        self._sent_pages: Int32Array = np.zeros_like(state.tables.held)

    def restart(self, epoch: int) -> None:
        """Starts the steps of a new group of runners."""
        self.epoch = epoch
        self._step = 0
        self._sent_pages[:] = 0

    def turn(self, epoch: int) -> None:
        """Starts the steps of another epoch of the same runners, which keep what they know."""
        self.epoch = epoch
        self._step = 0

    def build(
        self,
        decoding: Int64Array,
        chunks: list[Chunk],
        num_steps: int = 1,
        grants: Int64Array | None = None,
    ) -> StepRecord | None:
        """Returns the step that decodes ``decoding`` [D], then computes the chunks.

        Each slot of ``decoding`` gets up to ``num_steps`` tokens; over 1 only without chunks.
        With drafts each gets up to its ``grants`` [D].
        Returns None if the step is empty: then the runner diff and page moves wait.
        """
        if not len(decoding) and not chunks:
            return None
        running, tables = self._state.running, self._state.tables
        slots = decoding
        if chunks:
            slots = np.concatenate([decoding, np.array([c.slot for c in chunks], np.int64)])
        new_requests, finished = self._state.runner_diff.drain(slots.tolist())
        if new_requests:
            self._sent_pages[[new.handle for new in new_requests]] = 0
        kv_len, held = running.num_computed[slots], tables.held[slots]
        shape = self._decode_shape(len(decoding))
        if chunks:
            shape = self._mixed_shape(slots, kv_len, decoding, chunks)
        if grants is not None:
            prompts = shape.last_pos[len(decoding) :] >= 0
            grants = np.concatenate([grants, prompts])
        new_pages_len, snapshots = held - self._sent_pages[slots], self._state.snapshots
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
            grants=None if grants is None else grants.astype(np.int32),
            span_tokens=self._span_tokens(chunks),
            names=tables.name_changes(),
            states=None if snapshots is None else snapshots.saved(),
        )
        self._advance(slots, shape, len(decoding), num_steps, grants)
        self._sent_pages[slots] = held
        self._step += 1
        return StepRecord(info, slots, running.admission[slots])

    def _span_tokens(self, chunks: list[Chunk]) -> int:
        """Tokens of all spans that the chunks reach into."""
        running, total = self._state.running, 0
        for chunk in chunks:
            start = int(running.num_computed[chunk.slot])
            end = start + chunk.length
            for part in running.request(chunk.slot).source.parts:
                if (span := part.span) is not None and span[0] < end and start < span[1]:
                    total += span[1] - span[0]
        return total

    def _decode_shape(self, rows: int) -> _Shape:
        """The layout of a step of ``rows`` decoding rows."""
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

    def _advance(
        self,
        slots: Int64Array,
        shape: _Shape,
        decoding: int,
        num_steps: int,
        grants: Int64Array | None,
    ) -> None:
        """Advances the counters to where the step leaves them if all of its drafts are right."""
        running = self._state.running
        if num_steps > 1:
            granted = np.minimum(num_steps, running.room(slots)) if grants is None else grants
            running.num_computed[slots] += granted
            running.num_pending[slots] += granted
            return
        sampling = shape.last_pos >= 0
        if grants is None:
            running.num_computed[slots] += shape.chunk_len
            running.num_pending[slots] += sampling
        else:
            running.num_computed[slots] += np.where(shape.is_decoding, grants, shape.chunk_len)
            running.num_pending[slots] += grants
        if len(slots) > decoding:
            running.start_decoding(slots[decoding:][sampling[decoding:]].tolist())

    def _merge(self, decoding: Int64Array, computed: Int64Array, chunks: list[Chunk]) -> Int32Array:
        """The input tokens of all rows; those not known yet are placeholders."""
        running = self._state.running
        known = computed < running.num_known[decoding]
        decode_tokens = np.where(
            known, running.tokens[decoding, computed], np.int32(SAMPLED_LAST_STEP)
        )
        if not chunks:
            return decode_tokens
        parts = [decode_tokens]
        for chunk in chunks:
            start = int(running.num_computed[chunk.slot])
            parts.append(running.tokens[chunk.slot, start : start + chunk.length])
        return np.concatenate(parts)

    def _pages(self, slots: Int64Array, new_pages_len: Int32Array) -> Int32Array:
        rows = np.flatnonzero(new_pages_len)
        sent = self._sent_pages[slots[rows]].tolist()
        pages: list[int] = []
        for slot, count in zip(slots[rows].tolist(), sent, strict=True):
            pages += self._state.tables.entries_since(slot, count)
        return np.array(pages, np.int32)
