"""Which of an engine's processes gets a core first: the runners.

Whoever only moves messages steps back behind them: on a full machine a step waits for no parsing.
"""

import logging
import os

BEHIND_RUNNERS = 4
"""Niceness of a scheduler or an ingress over a runner's; under Ray's 15 the last there is."""

logger = logging.getLogger(__name__)


def step_behind_runners() -> None:
    """Lowers the priority of this process; for those that compute nothing."""
    try:
        os.nice(BEHIND_RUNNERS)
    except OSError as error:  # Windows has no niceness, a sandbox may forbid it
        logger.debug("this process keeps its priority: %s", error)
