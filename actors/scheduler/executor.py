"""What the engine runs its steps on: runner actors, a runner in this process, or a fake."""

from typing import Protocol

from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import SchedulerInfo, StepResult


class GroupFailed(RayfinError):
    """The runners are gone or broken; what ran on them must be recomputed on new ones."""

    code = "runner_failed"


class PendingStep(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Waits for the step.

        Raises:
            GroupFailed: it will never finish.
        """
        ...


class Executor(Protocol):
    """Runs steps in the order in which they are submitted."""

    epoch: int

    def submit(self, info: SchedulerInfo) -> PendingStep:
        """Hands over a step without waiting for it."""
        ...

    def restart(self) -> None:
        """Replaces the runners by new, empty ones and raises ``epoch``.

        Raises:
            GroupFailed: they cannot be started.
        """
        ...
