"""What the engine runs its steps on: runner actors, a runner in this process, or a fake."""

from typing import Protocol

from rayfin.actors.messages import SchedulerInfo, StepResult


class PendingStep(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Waits for the step.

        Raises:
            RunnerGroupFailed: it will never finish.
            Fenced: it was refused.
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
            RunnerGroupFailed: they cannot be started.
        """
        ...

    def sleep(self) -> None:
        """The runners forget all requests and give back the memory of their pages.

        Raises:
            RunnerGroupFailed: they have died.
        """
        ...

    def wake(self) -> None:
        """They take new, empty pages; raises ``epoch``.

        Raises:
            RunnerGroupFailed: they have died, or there is no memory.
        """
        ...
