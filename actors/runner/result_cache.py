"""The last results of a runner, for steps that are sent again because a call or its reply was lost.

Remote calls with "at most once" semantics (Birrell and Nelson, 1984): the caller numbers its calls
and repeats them, the callee remembers its replies.
"""

from collections import deque

from rayfin.actors.errors import StepMissing
from rayfin.actors.messages import SchedulerInfo, StepResult

KEPT = 8
"""More than steps are ever in flight."""


class StepResultCache:
    """The last ``kept`` results. `ModelRunner` alone knows which step comes next."""

    def __init__(self, kept: int = KEPT) -> None:
        self._last: deque[StepResult] = deque(maxlen=kept)

    def keep(self, result: StepResult) -> None:
        """Remembers the result of a step that has run."""
        self._last.append(result)

    def find(self, info: SchedulerInfo, next_step: tuple[int, int]) -> StepResult | None:
        """The result of this step, or None if the step is new or not known.

        Args:
            next_step: epoch and number of the step that the runner takes next.

        Raises:
            StepMissing: it is a later step than the next one.
        """
        epoch, number = next_step
        if info.epoch != epoch or info.step == number:
            return None
        if info.step > number:
            raise StepMissing(f"step {info.step} has come, and {number} has not")
        for result in self._last:
            if (result.epoch, result.step) == (info.epoch, info.step):
                return result
        return None
