"""The last answers of a runner, for calls that are made again because they, or their answers, were
lost on their way.

The idea is that of every remote call that runs "at most once" (Birrell and Nelson, 1984): the
caller numbers its calls and repeats them, the callee remembers what it has answered.
"""

from collections import deque

from rayfin.actors.errors import StepMissing
from rayfin.actors.messages import SchedulerInfo, StepResult

KEPT = 8
"""More than steps are ever in flight."""


class StepResultCache:
    """Of one epoch."""

    def __init__(self, kept: int = KEPT) -> None:
        self._last: deque[StepResult] = deque(maxlen=kept)
        self._epoch = -1
        self._next = 0

    def start(self, epoch: int) -> None:
        """Steps of ``epoch`` come from now on, from 0; those before are forgotten."""
        self._last.clear()
        self._epoch, self._next = epoch, 0

    def keep(self, result: StepResult) -> None:
        """The step has been run."""
        self._last.append(result)
        self._next = result.step + 1

    def find(self, info: SchedulerInfo) -> StepResult | None:
        """What was answered to this step; None: it is new, or not known.

        Raises:
            StepMissing: it is not the next one, but a later one.
        """
        if info.epoch != self._epoch or info.step == self._next:
            return None
        if info.step > self._next:
            raise StepMissing(f"step {info.step} has come, and {self._next} has not")
        for result in self._last:
            if result.step == info.step:
                return result
        return None
