"""What runs the engine's steps: runner actors, a runner in this process, or a fake."""

from collections.abc import Sequence
from typing import Protocol

from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import PageTransfer, SchedulerInfo, StepResult
from rayfin.actors.parts import Need
from rayfin.actors.weights.version import WeightVersion


class PendingStep(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Waits for the step.

        Raises:
            RunnerGroupFailed: it will never finish.
            Fenced: it was refused, since a later scheduler drives the runners.
        """
        ...


class PendingPrepare(Protocol):
    """What the runners prepare beside their steps."""

    def done(self) -> bool:
        """Whether all runners have answered, or will never do; cheap enough for each step."""
        ...

    def error(self) -> RayfinError | None:
        """Why something cannot be used; None if all is well, or if no runner could say so."""
        ...


class PendingTransfer(Protocol):
    """Pages on their way between files and all runners."""

    def done(self) -> bool:
        """Whether all runners have answered, or will never do; cheap enough for each step."""
        ...

    def count(self) -> int:
        """How many of the first pages are where they belong; 0 if a runner cannot say."""
        ...


class Executor(Protocol):
    """Runs steps in order of submission."""

    epoch: int

    def prepare(self, needs: Sequence[Need]) -> PendingPrepare:
        """Sends what requests to come need.

        Delays no step, and never raises.
        """
        ...

    def transfer(self, what: PageTransfer) -> PendingTransfer:
        """Moves pages behind the steps submitted so far, and beside those that follow.

        Delays no step, and never raises.
        """
        ...

    def submit(self, info: SchedulerInfo) -> PendingStep:
        """Submits a step without waiting for it."""
        ...

    def restart(self) -> None:
        """Replaces the runners by new, empty ones and raises ``epoch``.

        Raises:
            RunnerGroupFailed: they cannot be started.
        """
        ...

    def turn(self, version: WeightVersion, *, in_place: bool) -> None:
        """The runners, and those that replace them, compute by ``version``; raises ``epoch``.

        In place they keep what they know of requests, and their pages; else they are new and empty.

        Raises:
            RunnerGroupFailed: they have died amid it.
        """
        ...

    def sleep(self, *, deep: bool = False) -> None:
        """The runners drop all requests and free the memory of their pages.

        Args:
            deep: they free the model too.

        Raises:
            RunnerGroupFailed: they have died.
        """
        ...

    def load(self) -> None:
        """Makes a deep sleep a plain one, if it is deep: the model is loaded, by its version.

        Raises:
            RunnerGroupFailed: it cannot be.
        """
        ...

    def wake(self) -> None:
        """The runners allocate new, empty pages; raises ``epoch``.

        Raises:
            RunnerGroupFailed: they have died, or memory is short.
        """
        ...
