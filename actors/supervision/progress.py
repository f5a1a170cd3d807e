"""Whether an engine makes progress, by its counters. A client asks; it imports no scheduler."""

from rayfin.actors.errors import EngineUnavailable
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.timing import ENGINE_STALL_SECONDS, ENGINE_STALL_STEPS


def check_progress(stats: EngineStats) -> None:
    """Raises if an engine has requests and makes no progress. A busy engine that steps is healthy.

    Raises:
        EngineUnavailable: it has stalled.
    """
    patience = max(ENGINE_STALL_SECONDS, ENGINE_STALL_STEPS * stats.last_step_seconds)
    if stats.seconds_since_progress > patience:
        raise EngineUnavailable(
            f"no step finished for {stats.seconds_since_progress:.0f} s with "
            f"{stats.running + stats.waiting} requests in the engine"
        )
