"""Which decoding rows go in the next step: all of them, or one microbatch of a pipeline.

The first stage can begin a request's next token only after the last stage has sampled the one
before. If all rows went in every step, one stage would compute at a time. So the rows are divided
into as many microbatches as there are stages, and each stage computes another one (GPipe's
micro-batches, of requests).
"""

import numpy as np

from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.running_table import RunningTable


class DecodeMicrobatcher:
    """Divides the decoding rows among ``turns`` steps; those that have waited longest go first.

    A row decodes again only after the other microbatches: by then its token has been sampled, or is
    about to be.
    """

    def __init__(self, running: RunningTable, turns: int) -> None:
        self._running = running
        self.turns = turns
        self._now = 0
        self._went: Int64Array = np.full(len(running.requests), -turns, np.int64)  # by slot
        self.alternate = False
        """Whether the last step left out rows that could decode."""
        self.resting: Int64Array = np.zeros(0, np.int64)
        """Slots that do not decode for now."""

    def next_rows(self) -> Int64Array:
        """The slots [N] that decode in the next step.

        All of them if they are fewer than ``turns``, or if some must stay in lockstep.
        """
        running, turns = self._running, self.turns
        slots = running.decodable()
        if len(self.resting):
            slots = slots[~np.isin(slots, self.resting)]
        self.alternate = turns > 1 and len(slots) >= turns and not running.lockstep.any()
        if not self.alternate:
            return slots
        self._now += 1
        rested = slots[self._now - self._went[slots] >= turns]
        first = np.argsort(self._went[rested], kind="stable")[: -(-len(slots) // turns)]
        chosen = np.sort(rested[first])
        self._went[chosen] = self._now
        return chosen
