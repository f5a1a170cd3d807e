"""What a step costs beside computing: the way to the runner and back, if the scheduler waited."""

from collections import deque
from collections.abc import Callable

from rayfin.actors.histogram import Histogram
from rayfin.actors.messages import StepResult
from rayfin.actors.scheduler.executor import PendingStep


class StepOverheadTimer:
    """Times the steps in flight by the scheduler's clock and the durations that runners report.

    Clocks of two processes are never compared. A step can run once it is sent and the one before
    has returned. The time since then, less the computing, is overhead. It counts only as far as the
    scheduler waited: with two steps in flight the rest is hidden.
    """

    def __init__(self, clock: Callable[[], float], seconds: Histogram) -> None:
        self._clock = clock
        self._seconds = seconds
        self._sent: deque[float] = deque()
        self._returned = 0.0  # when the last result came

    def sent(self) -> None:
        """A step was submitted."""
        self._sent.append(self._clock())

    def result(self, pending: PendingStep) -> StepResult:
        """Waits for the oldest step; it stays the oldest if it fails."""
        started = self._clock()
        result = pending.result()
        now = self._clock()
        overhead = now - max(self._sent.popleft(), self._returned) - result.seconds
        self._seconds.observe(max(0.0, min(overhead, now - started)))
        self._returned = now
        return result

    def reset(self) -> None:
        """Drops the steps in flight."""
        self._sent.clear()
