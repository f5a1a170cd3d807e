"""How many engines there should be: Serve's autoscaling, by what the engines themselves say.

Serve's own measure, requests at its handles, sees nothing here: tokens travel by actor handles. So
each engine's supervisor reports its work (``AutoscalingReport``), and Serve's controller asks
``engines_wanted``. Serve applies bounds, and the delays of ``autoscaling_config``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.config import AutoscalingContext

from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.timing import UPSCALE_SECONDS

WAITING_TOKENS = 8192.0
"""Prompt tokens in the queue of an engine, over which another one is wanted ..."""

PAGE_SHARE = 0.8
"""... and the share of its pages that is held, for fuller engines preempt ..."""

TTFT_SECONDS = 2.0
"""... and the time that its queue takes at the pace at which it was admitted from so far."""

ONGOING = 1.0
"""... and its requests, as a share of ``target_ongoing_requests`` where an operator has set it."""

TARGETS = {
    **{"waiting_tokens": WAITING_TOKENS, "page_share": PAGE_SHARE, "ttft": TTFT_SECONDS},
    "ongoing": ONGOING,
}

FORGETTING = 0.7
"""Per report: the pace of admission is a moving mean."""


def wanted(reports: Mapping[str, Sequence[float]]) -> int:
    """Engines over which the work would spread at the targets; none if there is no work.

    ``reports`` are the values of each engine, by the names of ``TARGETS``, and "busy".
    """
    spread = [sum(values) / TARGETS[name] for name, values in reports.items() if name in TARGETS]
    least = 1 if any(reports.get("busy", [1.0])) else 0
    return max(least, math.ceil(max(spread, default=0.0)))


def engines_wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy; keeps the current number until an engine has reported."""
    metrics = context.aggregated_metrics or {}
    reports = {name: list(by_engine.values()) for name, by_engine in metrics.items()}
    if not any(reports.values()):
        return context.target_num_replicas, {}
    return wanted(reports), {}


def autoscaling(least: int, limit: int, idle_seconds: float) -> dict[str, Any]:
    """The ``autoscaling_config`` of the engine deployment.

    With ``least`` 0 the first engine is started all the same: ingresses learn its limits. From zero
    With no engine, Serve starts one for a call that is queued at the deployment's handle, which the
    waiting room makes (deployments/client/wait_for_engine.py). This policy is not called then.
    """
    return {
        "min_replicas": least,
        "initial_replicas": max(1, least),
        "max_replicas": limit,
        "upscale_delay_s": UPSCALE_SECONDS,
        "downscale_delay_s": idle_seconds,
        "metrics_interval_s": 2.0,
        "look_back_period_s": 10.0,
        "policy": {"policy_function": "rayfin.deployments.serve.autoscaling:engines_wanted"},
    }


class AutoscalingReport:
    """What one engine reports, from its counters at each look.

    Args:
        batches: background requests count too.
        ongoing_requests: over so many in an engine another one is wanted.
    """

    def __init__(self, batches: bool = False, ongoing_requests: float | None = None) -> None:
        self._batches = batches
        self._ongoing = ongoing_requests
        self._before: EngineStats | None = None
        self._at = 0.0
        self._pace = 0.0  # prompt tokens admitted a second, while some waited

    def update(self, stats: EngineStats, now: float) -> dict[str, float]:
        """The values of ``TARGETS``' names; ``now`` in seconds.

        And "busy": 1 if there is work, or was since the last look, or there was no look yet.
        """
        before, seconds = self._before, now - self._at
        busy = before is None or _work(stats) != _work(before) or stats.running or stats.waiting
        if before is not None and seconds > 0 and before.waiting_tokens:
            came = stats.prompt_tokens - before.prompt_tokens
            admitted = max(0.0, (before.waiting_tokens + came - stats.waiting_tokens) / seconds)
            self._pace = FORGETTING * self._pace + (1 - FORGETTING) * admitted
        self._before, self._at = stats, now
        waiting, held = stats.waiting_tokens, stats.pages_held
        if self._batches:
            waiting += stats.background_waiting_tokens
        else:
            held = max(0, held - stats.background_pages)
        return {
            "waiting_tokens": float(waiting),
            "page_share": held / stats.pages_total if stats.pages_total else 0.0,
            "ttft": stats.waiting_tokens / self._pace if self._pace else 0.0,
            "busy": 1.0 if busy else 0.0,
            **self._requests(stats),
        }

    def _requests(self, stats: EngineStats) -> dict[str, float]:
        if self._ongoing is None:
            return {}
        return {"ongoing": (stats.running + stats.waiting) / self._ongoing}


def _work(stats: EngineStats) -> tuple[int, int]:
    return stats.prompt_tokens, stats.generation_tokens
