"""What runners do with LoRA adapters, as they report it, and what an engine reports of that."""

from dataclasses import dataclass

from rayfin.actors.metric import counter, gauge

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
    bytes: int = gauge("adapter_bytes", "Memory of those adapters.")
    loading: int = gauge("adapters_loading", "Adapters that requests wait for.")
    requests_waiting: int = gauge(
        "num_requests_waiting_for_adapters",
        "Those requests; they are among the deferred ones.",
    )
    loads: dict[str, int] = counter(
        "adapter_loads", "LoRA adapters that the runner read.", "result", LOAD_RESULTS
    )
    evicted: int = counter(
        "adapter_evictions", "Adapters that left the runner's memory for others."
    )
