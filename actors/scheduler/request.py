"""A request as the scheduler knows it while it lives."""

from dataclasses import dataclass, field

from rayfin.actors.messages import EngineRequest


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its output. Its tokens are in the RunningTable while it holds a slot.

    ``output`` is the token log up to the last preemption; with the prompt it is all that a
    recomputation needs.
    """

    source: EngineRequest
    order: int  # arrival number in this engine
    output: list[int] = field(default_factory=list)
    slot: int | None = None  # None while waiting
    num_preemptions: int = 0
    cancelled: bool = False  # ended while waiting; the queue drops it lazily

    @property
    def num_tokens(self) -> int:
        """Known tokens, while the request waits."""
        return len(self.source.prompt) + len(self.output)
