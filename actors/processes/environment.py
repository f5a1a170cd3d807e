"""Priorities of an engine's processes, and the environment of a Ray that Rayfin starts.

Processes that only move messages have a lower priority than runners, so that on a full machine no
step waits for parsing.
"""

import logging
import os
import sys

BEHIND_RUNNERS = 4
"""Niceness that a scheduler or an ingress adds to a runner's; with Ray's 15 it is the maximum."""

logger = logging.getLogger(__name__)


def lower_priority() -> None:
    """Lowers the priority of this process, which computes nothing."""
    try:
        os.nice(BEHIND_RUNNERS)
    except OSError as error:  # Windows has no niceness, a sandbox may forbid it
        logger.debug("this process keeps its priority: %s", error)


def only_when_idle(thread: int = 0) -> None:
    """Has a thread, or this one, compute where no other thread wants the processor (Linux).

    One that wakes takes the processor from it at once. A thread of high niceness keeps it for its
    slice, some milliseconds, and each forward of a model wakes threads hundreds of times.
    """
    if sys.platform == "linux":
        try:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        except OSError as error:
            logger.debug("a thread keeps its priority: %s", error)


# The environment of the processes of a Ray that Rayfin starts. On other clusters the operator sets
# it: k8s/base/rayservice.yaml does.

ENVIRONMENT = {
    # Ray gives every worker nice 15, below all else on the machine.
    "RAY_worker_niceness": "0",
    # malloc keeps megabytes for each arena in which a thread has been, 8 a core, and Ray's
    # processes have dozens of threads: without this they still grew after half an hour.
    "MALLOC_ARENA_MAX": "2",
}


def set_ray_environment() -> None:
    """Called before ``ray.init`` starts a Ray; keeps variables that are already set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
