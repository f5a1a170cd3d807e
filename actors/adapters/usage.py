"""What runners do with LoRA adapters, as they report it, and what an engine reports of that."""

from dataclasses import dataclass, field

SHORT_DIGEST = 16
"""Hex digits by which an engine's reports name an adapter."""

LOAD_RESULTS = ("ok", "failed")


def short(digest: str) -> str:
    """The part of a digest that reports carry."""
    return digest[:SHORT_DIGEST]


@dataclass(slots=True, frozen=True)
class AdapterUsage:
    """What a runner did with adapters since its last result."""

    resident: tuple[str, ...] = ()  # short digests of those that it holds now
    bytes: int = 0  # that they take
    load_seconds: tuple[float, ...] = ()  # of each adapter that it read
    failed: int = 0  # adapters that it could not read
    evicted: int = 0  # adapters that made room for others


@dataclass(slots=True, frozen=True)
class AdapterStats:
    """The adapters of an engine: in a heartbeat, and in the metrics."""

    max_loras: int = 0  # in one step; 0: it serves none
    running: tuple[str, ...] = ()  # names, of requests that hold a slot
    waiting: tuple[str, ...] = ()  # names, of requests that hold none
    resident: frozenset[str] = frozenset()  # short digests, as of the runner's last news
    bytes: int = 0  # that the resident ones take
    loading: int = 0  # adapters that requests wait for ...
    requests_waiting: int = 0  # ... and those requests
    loads: dict[str, int] = field(default_factory=dict)  # LOAD_RESULTS -> adapters read
    evicted: int = 0
