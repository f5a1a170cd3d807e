"""What an operator is told of one engine."""

from dataclasses import dataclass, fields
from typing import Any

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

    def as_json(self) -> dict[str, Any]:
        """With those of the counters that are numbers, words, or numbers by word."""
        counters = {own.name: getattr(self.stats, own.name) for own in fields(self.stats)}
        plain = {name: value for name, value in counters.items() if _is_plain(value)}
        return {"engine": self.engine, "name": self.name, "state": self.state, "stats": plain}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(own, int) for own in value.values())
    return isinstance(value, int | float | str)
