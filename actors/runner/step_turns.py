"""Runs a runner's steps in their order, though two threads bring them.

A GPU that gets a step only when the one before has been answered waits for a call's whole way. So
two calls are in the runner's process at once: one waits for the device, while the other queues its
step behind it (the overlapped schedule of SGLang 0.4 and of vLLM's asynchronous scheduling).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rayfin.actors.errors import StepMissing
from rayfin.actors.messages import SchedulerInfo, StepResult

KEPT = 8
"""More than steps are ever in flight."""


class StepResultCache:
    """The last ``kept`` results, for steps that are sent again: a call or its reply was lost.

    Remote calls with "at most once" semantics (Birrell and Nelson, 1984): the caller numbers its
    calls and repeats them, the callee remembers its replies. `ModelRunner` alone knows which step
    comes next.
    """

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


class OverlappingRunner(Protocol):
    """What a ``ModelRunner`` has for this."""

    @property
    def next_step(self) -> tuple[int, int]: ...

    def begin(self, info: SchedulerInfo) -> bool: ...

    def wait(self) -> None: ...

    def execute(self, info: SchedulerInfo) -> StepResult: ...


class StepTurns:
    """One thread at a time uses the runner, but for the time in which one waits for the device.

    Args:
        overtaken: seconds that a step waits for the one before it, which may have come later,
            since two threads take calls.
    """

    def __init__(self, results: StepResultCache, overtaken: float) -> None:
        self._results = results
        self._overtaken = overtaken
        self._changed = threading.Condition()
        self._taken: list[tuple[int, int]] = []  # steps of which a thread waits, in their order

    def run(
        self,
        runner: OverlappingRunner,
        info: SchedulerInfo,
        execute: Callable[[SchedulerInfo], StepResult],
    ) -> StepResult:
        """Runs the step with ``execute`` in its turn, or returns its result if it has run.

        Raises:
            StepMissing: the step before it has not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_early(runner, info), self._overtaken)
            self._changed.wait_for(lambda: (info.epoch, info.step) not in self._taken)
            epoch, step = runner.next_step
            if (result := self._results.find(info, (epoch, step + len(self._taken)))) is not None:
                return result
            runner.begin(info)
            self._taken.append((info.epoch, info.step))
            self._changed.notify_all()
        with self._turn(info):
            runner.wait()
            with self._changed:
                return execute(info)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The runner for one thread, once all steps that threads have taken have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken)
            yield

    def _is_early(self, runner: OverlappingRunner, info: SchedulerInfo) -> bool:
        """Whether a step of the epoch before this one has not been taken by any thread."""
        epoch, step = runner.next_step
        return info.epoch == epoch and info.step > step + len(self._taken)

    @contextmanager
    def _turn(self, info: SchedulerInfo) -> Iterator[None]:
        """From when all steps before this one have ended to its own end."""
        turn = (info.epoch, info.step)
        with self._changed:
            self._changed.wait_for(lambda: self._taken[0] == turn)
        try:
            yield
        finally:
            with self._changed:
                self._taken.remove(turn)
                self._changed.notify_all()
