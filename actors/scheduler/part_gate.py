"""At most so many parts of a kind run at once: those that one step can have."""

from collections.abc import Iterable

from rayfin.actors.parts import PartFacts, first_of
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.running_table import RunningTable


class PartGate:
    """An ``AdmissionGate``. A request always passes whose parts run already, or are not limited.

    Adapters are: a step computes with ``max_loras`` at most.
    """

    def __init__(self, running: RunningTable, served: Iterable[PartFacts]) -> None:
        self._running = running
        self._limits = [(facts.of, facts.at_once) for facts in served if facts.at_once is not None]

    def may_admit(self, request: Request) -> bool:
        """Whether its parts run, or one more of their kind may."""
        if not request.source.parts:
            return True
        for kind, at_once in self._limits:
            part = first_of(request.source.parts, kind)
            if part is None:
                continue
            others = (other.source.part(kind) for other in self._running.holders())
            keys = {other.key for other in others if other is not None}
            if part.key not in keys and len(keys) >= at_once:
                return False
        return True
