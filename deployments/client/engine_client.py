"""What an ingress needs of an engine, whatever carries it: actor handles, or a fake in a test."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from rayfin.actors.messages import Command, EngineInfo, EngineRequest, TokenDelta, TokenLog
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.metrics.snapshot import EngineSnapshot
from rayfin.actors.parts import RequestPart

# The report of one engine to an operator.


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine, as one ingress sees it."""

    engine: str  # its label in metrics, by which commands name it
    name: str  # of its scheduler in Ray's actor registry
    state: str  # "ready", "draining", "asleep", or "lost" if it does not answer
    stats: EngineStats

    @classmethod
    def of(cls, engine: str, name: str, stats: EngineStats | None) -> "EngineReport":
        """``stats`` is None if the engine does not answer."""
        if stats is None:
            return cls(engine, name, "lost", EngineStats())
        state = "asleep" if stats.asleep else "draining" if stats.draining else "ready"
        return cls(engine, name, state, stats)

    def as_json(self) -> dict[str, Any]:
        """With those of the counters that are numbers, words, or numbers by word."""
        counters = {field.name: getattr(self.stats, field.name) for field in fields(self.stats)}
        plain = {name: _plain(value) for name, value in counters.items()}
        plain = {name: value for name, value in plain.items() if value is not None}
        return {"engine": self.engine, "name": self.name, "state": self.state, "stats": plain}


def _plain(value: Any) -> Any:
    """The value as JSON, with the words of several labels as one; None if it is of another kind."""
    if isinstance(value, dict) and all(isinstance(number, int) for number in value.values()):
        return {
            words if isinstance(words, str) else " ".join(words): value[words] for words in value
        }
    return value if isinstance(value, int | float | str) else None


class EngineClient(Protocol):
    """The token side of an ingress: requests in, token deltas out. Knows no text."""

    def close(self) -> None:
        """Leaves the engines; what is still open is aborted there."""
        ...

    async def info(self) -> EngineInfo:
        """Limits of the engine that requests are checked against.

        Raises:
            EngineUnavailable: no engine is ready.
        """
        ...

    async def prepare(self, part: RequestPart) -> None:
        """Has every engine prepare what requests with ``part`` need.

        Raises:
            InvalidRequest: the part does not fit the model.
        """
        ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of one request, the last one with a ``finish_reason``.

        Closing the generator early (``aclose``, cancellation) aborts the request in the engine,
        where it counts as aborted, or as stopped if ``request.satisfied``.

        Raises:
            InvalidRequest: the engine cannot ever run it (for instance more pages than exist).
            RequestFailed, Overloaded, EngineUnavailable: as named. An engine that is lost is no
                error: the stream pauses, and goes on at another one.
        """
        ...

    async def recall(self, tenant: str, request_ids: Sequence[str]) -> list[TokenLog | None]:
        """The output so far of the tenant's requests with these ids; None where nothing is known.

        Running ones are aborted: the caller continues them.
        """
        ...

    async def check_health(self) -> None:
        """Returns when an engine makes progress (or is idle and answers).

        Raises:
            EngineUnavailable: with the reason.
        """
        ...

    async def snapshots(self) -> list[EngineSnapshot]:
        """What each engine that answers is doing."""
        ...

    async def engines(self) -> list[EngineReport]:
        """Each engine there is, for an operator."""
        ...

    async def manage(self, command: Command, engine: str | None) -> list[EngineReport]:
        """Sends a command to one engine or all; returns the reports of those that got it.

        Raises:
            NotFound: there is no such engine.
            EngineUnavailable: one has not carried it out.
        """
        ...

    def latency(self) -> dict[str, tuple[float, int]]:
        """Sums in seconds and counts of "ttft" and "itl", as this ingress has seen them."""
        ...

    async def metrics(self) -> bytes:
        """The Prometheus text of everything this ingress can see."""
        ...
