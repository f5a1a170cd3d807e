"""What decides a step."""

from typing import Protocol

from rayfin.actors.messages import Int64Array, SchedulerInfo, StepResult
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.step_builder import Chunk


class StepScheduler(Protocol):
    """Decides a step; owns no request."""

    def schedule(self) -> tuple[Int64Array, list[Chunk]]: ...

    def longest_chunk(self, request: Request) -> int:
        """Most tokens of the request's prompt in a step that computes nothing else."""
        ...

    def observe(self, info: SchedulerInfo, result: StepResult) -> None:
        """A step ran."""
        ...
