"""How many tokens a decoding row may gain in a call: the scheduler counts, the runner proposes."""

import numpy as np

from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.scheduler_state import SchedulerState


class DraftPolicy:
    """Grants each decoding row up to ``most`` drafts in each decode step of a call."""

    def __init__(self, state: SchedulerState, most: int) -> None:
        self._state = state
        self._most = most

    def grant(self, decoding: Int64Array, num_steps: int) -> Int64Array | None:
        """Most tokens [D] of a call for the slots of ``decoding`` [D], with pages for all of them.

        None in an engine without drafts. No draft preempts a request: if too few pages would stay
        free for each request to grow, no row has any. The runner puts fewer drafts into a step than
        granted, as its memory and the time of a step allow.
        """
        if not self._most or not len(decoding):
            return None
        running, tables = self._state.running, self._state.tables
        room = running.room(decoding)
        # The step behind this one is scheduled before its answer: it finds room for its tokens.
        ahead = np.maximum(room - num_steps, np.minimum(room, num_steps))
        grants = np.minimum(ahead, num_steps * (1 + self._most))
        grants[running.lockstep[decoding]] = 1
        ends = running.num_computed[decoding] + grants
        missing = -(-ends // tables.page_size) - tables.held[decoding]
        crossing = missing > 0
        if missing[crossing].sum() + len(running) > tables.pool.num_free:
            return np.minimum(room, num_steps)
        for slot, end in zip(decoding[crossing].tolist(), ends[crossing].tolist(), strict=True):
            tables.grow(slot, end)
        return grants
