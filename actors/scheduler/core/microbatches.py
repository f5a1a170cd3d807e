"""Which decoding rows go in the next step: all of them, or in a pipeline some after the others.

A token leaves the last stage before the first one can begin the next of the same request. If all
rows went in every step, a pipeline would compute one stage at a time. So the rows take turns, as
many as there are stages, and while one share of them is in the second stage, the next is in the
first (GPipe's micro-batches, of requests).
"""

import numpy as np

from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.state.running_table import RunningTable


class DecodeMicrobatcher:
    """Shares the decoding rows among ``turns`` steps; those that have waited longest go first.

    A row that has just gone rests until all the others have: its next token is known to the first
    stage by then, or about to be.
    """

    def __init__(self, running: RunningTable, turns: int) -> None:
        self._running = running
        self._turns = turns
        self._now = 0
        self._went: Int64Array = np.full(len(running.requests), -turns, np.int64)  # by slot
        self.alternate = False
        """Whether the rows of the last turn were not all that could decode."""

    def next_rows(self) -> Int64Array:
        """The slots [N] that decode in the next step.

        All at once where there are fewer than turns, and where some must stay in lockstep.
        """
        running, turns = self._running, self._turns
        slots = running.decodable()
        self.alternate = turns > 1 and len(slots) >= turns and not running.lockstep.any()
        if not self.alternate:
            return slots
        self._now += 1
        rested = slots[self._now - self._went[slots] >= turns]
        first = np.argsort(self._went[rested], kind="stable")[: -(-len(slots) // turns)]
        chosen = np.sort(rested[first])
        self._went[chosen] = self._now
        return chosen
