"""What an operator is told of one engine."""

from dataclasses import dataclass

from rayfin.actors.messages import EngineStats


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine, as one ingress sees it."""

    engine: str  # its label in metrics, by which commands name it
    name: str  # of its scheduler in Ray's actor registry
    state: str  # "ready", "draining", "asleep", or "lost" where nobody answers
    stats: EngineStats

    @classmethod
    def of(cls, engine: str, name: str, stats: EngineStats | None) -> "EngineReport":
        """``stats`` are None where nobody answers."""
        if stats is None:
            return cls(engine, name, "lost", EngineStats())
        state = "asleep" if stats.asleep else "draining" if stats.draining else "ready"
        return cls(engine, name, state, stats)
