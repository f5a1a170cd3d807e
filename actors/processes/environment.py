"""Priorities of an engine's processes, and the environment of a Ray that Rayfin starts.

Processes that only move messages have a lower priority than runners, so that on a full machine no
step waits for parsing.
"""

import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

BEHIND_RUNNERS = 4
"""Niceness that a scheduler or an ingress adds to a runner's; with Ray's 15 it is the maximum."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


def lower_priority() -> None:
    """Lowers the priority of this process, which computes nothing."""
    try:
        os.nice(BEHIND_RUNNERS)
    except OSError as error:  # Windows has no niceness, a sandbox may forbid it
        logger.debug("this process keeps its priority: %s", error)


def at_low_priority(work: Callable[[], T]) -> T:
    """Runs ``work`` in a thread that ends with it, because a priority cannot be raised again.

    Threads that it starts have the same priority. Only Linux has priorities of threads; elsewhere
    the priority stays.
    """

    def run() -> T:
        if sys.platform == "linux":
            lower_priority()
        return work()

    with ThreadPoolExecutor(1, "low-priority") as thread:
        return thread.submit(run).result()


def only_when_idle(thread: int = 0) -> bool:
    """Has a thread, or this one, compute where no other thread wants the processor (Linux).

    False: the system has no such priority, or denies it.

    One that wakes takes the processor from it at once. A thread of high niceness keeps it for its
    slice, some milliseconds, and each forward of a model wakes threads hundreds of times.
    """
    if sys.platform == "linux":
        try:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            return True
        except OSError as error:
            logger.debug("a thread keeps its priority: %s", error)
    return False


# The environment of the processes of a Ray that Rayfin starts. On other clusters the operator sets
# it: k8s/base/rayservice.yaml does.

ENVIRONMENT = {
    # Ray gives every worker nice 15, below all else on the machine.
    "RAY_worker_niceness": "0",
    # malloc keeps megabytes for each arena in which a thread has been, 8 a core, and Ray's
    # processes have dozens of threads: without this they still grew after half an hour.
    "MALLOC_ARENA_MAX": "2",
    # What an idle server costs. Each process would send what its calls did every second, for
    # `ray list tasks`, time each of its own events, and report figures to an agent, from which no
    # program scrapes them: Rayfin has its own (docs/observability.md). Each of Serve's would count
    # its requests ten times a second, and its controller look at everything as often. An agent
    # would measure all processes, for a dashboard that is not there. Log files would be looked for
    # twice a second, and free memory four times.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "REPORTER_UPDATE_INTERVAL_MS": "30000",
    "LOG_NAME_UPDATE_INTERVAL_S": "2",
    "RAY_memory_monitor_refresh_ms": "1000",
    # Ray's agents would ask every 400 ms whether their raylet lives. The end of a pipe says so.
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",
    # Ray would print seven lines in the terminal for each process that has died, where a supervisor
    # replaces it and says so.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^A worker died or was killed",
    # Ray would send statistics of its use to its makers.
    "RAY_USAGE_STATS_ENABLED": "0",
}


def set_ray_environment() -> None:
    """Called before ``ray.init`` starts a Ray; keeps variables that are already set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
