"""Which of an engine's processes gets a core first: the runners.

Whoever only moves messages steps back behind them: on a full machine a step waits for no parsing.
"""

import logging
import os

BEHIND_RUNNERS = 4
"""Niceness of a scheduler or an ingress over a runner's; under Ray's 15 the last there is."""

logger = logging.getLogger(__name__)


def lower_priority() -> None:
    """Lowers the priority of this process; for those that compute nothing."""
    try:
        os.nice(BEHIND_RUNNERS)
    except OSError as error:  # Windows has no niceness, a sandbox may forbid it
        logger.debug("this process keeps its priority: %s", error)


# What the processes of a Ray that we start ourselves find in their environment.
#
# Elsewhere an operator says so: k8s/base/rayservice.yaml does.

ENVIRONMENT = {
    # Ray gives every worker nice 15, below all else on the machine.
    "RAY_worker_niceness": "0",
    # malloc keeps megabytes for each arena in which a thread has been, 8 a core, and Ray's
    # processes have dozens of threads: without this they still grew after half an hour.
    "MALLOC_ARENA_MAX": "2",
}


def set_ray_environment() -> None:
    """Before ``ray.init`` starts a Ray. What the environment says already stands."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
