"""What the engine runs its steps on: runner actors, a runner in this process, or a fake."""

from typing import Protocol

from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import SchedulerInfo, StepResult


class GroupFailed(RayfinError):
    """The runners are gone or broken; what ran on them must be recomputed on new ones.

    ``by_step``: a runner said that a step did it; nobody else can have.
    """

    code = "runner_failed"

    def __init__(self, message: str, param: str | None = None, by_step: bool = False) -> None:
        super().__init__(message, param)
        self.args = (message, param, by_step)
        self.by_step = by_step


class Fenced(RayfinError):
    """The runners belong to a later scheduler: this one was taken for dead, and must not go on."""

    code = "fenced"


class StepMissing(RayfinError):
    """A step has come before the one that it follows, which was lost on its way."""

    code = "runner_failed"


class PeerLost(RayfinError):
    """A runner waits in vain for another one of its group: somebody has died, or is stuck."""

    code = "runner_failed"


class PendingStep(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Waits for the step.

        Raises:
            GroupFailed: it will never finish.
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
            GroupFailed: they cannot be started.
        """
        ...

    def sleep(self) -> None:
        """The runners forget all requests and give back the memory of their pages.

        Raises:
            GroupFailed: they have died.
        """
        ...

    def wake(self) -> None:
        """They take new, empty pages; raises ``epoch``.

        Raises:
            GroupFailed: they have died, or there is no memory.
        """
        ...
