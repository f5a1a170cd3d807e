"""Which of an engine's processes gets a core first: the runners.

Ray gives every worker nice 15, below all else on the machine; a Ray of our own gives none. Whoever
only moves messages steps back behind the runners: on a full machine a step waits for no parsing.
"""

import logging
import os

RAY_NICENESS = "RAY_worker_niceness"
"""Ray's setting, read from the environment when a cluster is started."""

BEHIND_RUNNERS = 4
"""Niceness of a scheduler or an ingress over a runner's; under Ray's 15 the last there is."""

logger = logging.getLogger(__name__)


def keep_workers_equal() -> None:
    """A Ray that this process starts leaves its workers at its own niceness, unless told."""
    os.environ.setdefault(RAY_NICENESS, "0")


def step_behind_runners() -> None:
    """Lowers the priority of this process; for those that compute nothing."""
    try:
        os.nice(BEHIND_RUNNERS)
    except OSError as error:  # Windows has no niceness, a sandbox may forbid it
        logger.debug("this process keeps its priority: %s", error)
