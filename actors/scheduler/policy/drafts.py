"""How many drafts a decoding row may have: the scheduler counts tokens that the runner proposes."""

import numpy as np

from rayfin.actors.config import BatchLimits
from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.core.scheduler_state import SchedulerState
from rayfin.actors.scheduler.core.step_builder import Chunk


class DraftPolicy:
    """Gives each decoding row up to ``most`` drafts of what a step has left."""

    def __init__(self, state: SchedulerState, limits: BatchLimits, most: int) -> None:
        self._state = state
        self._limits = limits
        self._most = most

    def grant(self, decoding: Int64Array, chunks: list[Chunk]) -> Int64Array | None:
        """Drafts [D] for the slots of ``decoding`` [D], with pages for all of them, or None.

        No draft preempts a request: short of pages, no row has any. Each draft takes one of the
        ``max_decoding_batch`` rows of logits that memory was measured with.
        """
        if not self._most or not len(decoding):
            return None
        running, tables, limits = self._state.running, self._state.tables, self._limits
        counts: Int64Array = np.clip(running.room(decoding) - 1, 0, self._most)
        counts[running.lockstep[decoding]] = 0
        tokens = len(decoding) + sum(chunk.length for chunk in chunks)
        rows = len(decoding) + len(chunks)
        budget = min(limits.max_batch_tokens - tokens, limits.max_decoding_batch - rows)
        counts = np.clip(budget - (np.cumsum(counts) - counts), 0, counts)
        if not counts.any():
            return None
        ends = running.num_computed[decoding] + 1 + counts
        missing = -(-ends // tables.page_size) - tables.held[decoding]
        crossing = missing > 0
        if missing[crossing].sum() > tables.pool.num_free:
            return None
        for slot, end in zip(decoding[crossing].tolist(), ends[crossing].tolist(), strict=True):
            tables.grow(slot, end)
        return counts
