"""The steps in flight: built, submitted to the runners, and waited for in order."""

from collections import deque
from collections.abc import Callable

from rayfin.actors.messages import Int64Array, StepResult
from rayfin.actors.metric import Histogram
from rayfin.actors.scheduler.executor import Executor, PendingStep
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import SchedulerState
from rayfin.actors.scheduler.step_builder import Chunk, StepBuilder, StepRecord
from rayfin.actors.weights.version import WeightVersion


class StepPipeline:
    """Owns the executor: only this class submits steps to it or restarts it."""

    def __init__(
        self, state: SchedulerState, executor: Executor, clock: Callable[[], float]
    ) -> None:
        self._running = state.running
        self._executor = executor
        self._builder = StepBuilder(state)
        self._builder.restart(executor.epoch)
        self._in_flight: deque[tuple[StepRecord, PendingStep]] = deque()
        self._overhead = StepOverheadTimer(
            clock, state.counters.histograms["step_transport_seconds"]
        )

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def epoch(self) -> int:
        return self._builder.epoch

    def submit(
        self,
        decoding: Int64Array,
        chunks: list[Chunk],
        num_steps: int,
        grants: Int64Array | None = None,
    ) -> bool:
        """Submits the step, unless it is empty; returns whether it did. See ``StepBuilder``."""
        record = self._builder.build(decoding, chunks, num_steps, grants)
        if record is None:
            return False
        self._overhead.sent()
        self._in_flight.append((record, self._executor.submit(record.info)))
        return True

    def wait(self) -> tuple[StepRecord, StepResult]:
        """Waits for the oldest step, which stays in flight until ``pop``.

        Raises:
            RunnerGroupFailed: it will never finish.
        """
        record, pending = self._in_flight[0]
        return record, self._overhead.result(pending)

    def pop(self) -> None:
        """The oldest step's result is processed."""
        self._in_flight.popleft()

    def requests(self) -> list[Request]:
        """The running requests that steps in flight have rows of."""
        running, requests = self._running, dict[Request, None]()
        for record, _ in self._in_flight:
            for slot, admission in zip(record.slots, record.admissions, strict=True):
                if running.admission[slot] == admission:
                    requests[running.request(int(slot))] = None
        return list(requests)

    def clear(self) -> None:
        """Drops the steps in flight: the runners have died."""
        self._in_flight.clear()
        self._overhead.reset()

    def restart(self, *, asleep: bool) -> None:
        """Replaces the runners by new ones of a new epoch, which sleep if ``asleep``.

        Raises:
            RunnerGroupFailed: they cannot be started.
        """
        self._executor.restart()
        if asleep:
            self._executor.sleep()
        self._builder.restart(self._executor.epoch)

    def turn(self, version: WeightVersion, *, in_place: bool, asleep: bool) -> None:
        """See ``Executor.turn``; no step may be in flight. New runners sleep if ``asleep``."""
        self._executor.turn(version, in_place=in_place)
        if asleep and not in_place:
            self._executor.sleep()
        begin = self._builder.turn if in_place else self._builder.restart
        begin(self._executor.epoch)

    def sleep(self, *, deep: bool) -> None:
        """See ``Executor.sleep``; no step may be in flight."""
        self._executor.sleep(deep=deep)

    def load(self) -> None:
        """See ``Executor.load``."""
        self._executor.load()

    def wake(self) -> None:
        """See ``Executor.wake``."""
        self._executor.wake()
        self._builder.restart(self._executor.epoch)


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
