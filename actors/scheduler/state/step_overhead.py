"""What a step costs beside computing: its way to the runner and back, as far as somebody waited."""

from collections import deque
from collections.abc import Callable

from rayfin.actors.histogram import Histogram
from rayfin.actors.messages import StepResult
from rayfin.actors.scheduler.state.executor import PendingStep


class StepOverheadTimer:
    """Times the steps in flight by the scheduler's clock and the runner's durations alone.

    No clock is compared with another's. A step could run from when it was sent, or from when the
    one before was back, whichever is later; what passed since then and was not computing was its
    way. Of that counts what the scheduler waited for: with two steps in flight the rest is hidden.
    """

    def __init__(self, clock: Callable[[], float], seconds: Histogram) -> None:
        self._clock = clock
        self._seconds = seconds
        self._sent: deque[float] = deque()
        self._back = 0.0  # when the last result came

    def sent(self) -> None:
        """A step goes out."""
        self._sent.append(self._clock())

    def result(self, pending: PendingStep) -> StepResult:
        """The result of the oldest one, which stays the oldest if it fails."""
        asked = self._clock()
        result = pending.result()
        now = self._clock()
        way = now - max(self._sent.popleft(), self._back) - result.seconds
        self._seconds.observe(max(0.0, min(way, now - asked)))
        self._back = now
        return result

    def forget(self) -> None:
        """The steps in flight are lost."""
        self._sent.clear()
