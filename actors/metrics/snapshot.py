"""What an engine shows to operators: running and waiting requests, and the owners of pages."""

from dataclasses import dataclass, field

FREE, KEPT, SHARED = -1, -2, -3
"""Page owners other than one request: FREE, KEPT (free, reusable by prefix), SHARED (several)."""


@dataclass(frozen=True, slots=True)
class RunningView:
    """A request that holds slots. ``id`` is its number of arrival in this engine."""

    id: int
    phase: str  # "prefill" or "decode"
    prompt: int  # tokens
    cached: int  # of those, found in the cache at the first admission
    output: int  # tokens known
    pages: int  # held, shared ones included


@dataclass(frozen=True, slots=True)
class WaitingView:
    """A request in the queue."""

    id: int
    prompt: int  # tokens
    seconds: float  # since its arrival


@dataclass(frozen=True, slots=True)
class StepView:
    """The composition of a step."""

    decode: int = 0  # rows
    prefill_rows: int = 0
    prefill_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PagesView:
    """The first pages of the cache by owner, run-length encoded: [(owner, count)].

    An owner is an index into ``EngineSnapshot.running``, or FREE, KEPT or SHARED.
    """

    total: int
    page_size: int
    map: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """One moment of one engine, between two steps."""

    name: str
    epoch: int
    steps: int
    num_running: int
    num_waiting: int
    running: list[RunningView]  # at most MOST_SHOWN of them
    waiting: list[WaitingView]
    step: StepView
    pages: PagesView
    totals: dict[str, int | dict[str, int]]  # counters of EngineStats, by their names
