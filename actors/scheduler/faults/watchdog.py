"""How long a step may take before its runners count as hung.

Ray detects a process that has died, but not one that has stopped (SIGSTOP, a collective that never
ends, a lock). So each step has a time limit: a multiple of what its work should take by the pace
measured so far, and at least a floor. Work is counted in tokens. A token in a long context counts
for more, so that a long prompt does not look like a hang. Tokens of images that a tower computes
have a pace of their own: a chunk of few tokens may be the first to reach into a large image.
"""

import numpy as np

from rayfin.actors.messages import SchedulerInfo
from rayfin.actors.timing import (
    FIRST_RESTART_PAUSE_SECONDS,
    FIRST_STEPS_LIMIT_SECONDS,
    LATER_FIRST_STEPS_LIMIT_SECONDS,
    MAX_RESTART_PAUSE_SECONDS,
    MIN_STEP_LIMIT_SECONDS,
)

FIRST_STEPS = 3
MULTIPLE = 20.0
CONTEXT_TOKENS = 2048
"""Context at which attention is assumed to cost as much as all the rest; deliberately low."""

FORGETTING = 0.999
"""Decay of the slowest pace seen, per step."""


class Watchdog:
    """Measures the slowest pace of a runner group, and limits each step by it."""

    def __init__(
        self, floor: float = MIN_STEP_LIMIT_SECONDS, first: float = FIRST_STEPS_LIMIT_SECONDS
    ) -> None:
        self._floor = floor
        self._first = self._longest_first = first
        self._steps = 0
        self._restarts = 0  # since a step was finished
        self._slowest_first = 0.0  # of the first steps of all runners
        self._seconds_per_token = 0.0
        self._seconds_per_step = 0.0
        self._seconds_per_span_token = 0.0  # in the tower

    def restart(self) -> None:
        """The runners are new: they compile again, about as fast as the ones before."""
        if self._steps >= FIRST_STEPS:
            again = max(LATER_FIRST_STEPS_LIMIT_SECONDS, MULTIPLE * self._slowest_first)
            self._first = min(self._longest_first, again)
        self._steps = 0
        self._restarts += 1

    def backoff(self) -> float:
        """Seconds to wait before a restart; doubles while restarted runners finish no step."""
        if self._restarts < 2:
            return 0.0
        return float(
            min(FIRST_RESTART_PAUSE_SECONDS * 2 ** (self._restarts - 2), MAX_RESTART_PAUSE_SECONDS)
        )

    def patience(self, info: SchedulerInfo) -> float:
        """Seconds that the step may take."""
        expected = info.num_steps * self._seconds_per_step + work(info) * self._seconds_per_token
        expected += info.span_tokens * self._seconds_per_span_token
        least = self._first if self._steps < FIRST_STEPS else self._floor
        if info.span_tokens and not self._seconds_per_span_token:
            least = self._longest_first  # the tower's pace is not known yet
        return max(least, MULTIPLE * expected)

    def observe(self, info: SchedulerInfo, seconds: float, in_tower: float = 0.0) -> None:
        """A step took the runners ``seconds``, of which ``in_tower`` were for images."""
        if self._steps < FIRST_STEPS:
            self._slowest_first = max(seconds, self._slowest_first)
        self._steps += 1
        self._restarts = 0
        if info.span_tokens and in_tower:
            pace = in_tower / info.span_tokens
            slowest = self._seconds_per_span_token * FORGETTING
            self._seconds_per_span_token = max(pace, slowest)
        if info.prefill_batch:
            pace = (seconds - in_tower) / max(work(info), 1.0)
            self._seconds_per_token = max(pace, self._seconds_per_token * FORGETTING)
        else:
            pace = seconds / info.num_steps
            self._seconds_per_step = max(pace, self._seconds_per_step * FORGETTING)


def work(info: SchedulerInfo) -> float:
    """A step's prompt work in tokens of a short context; 0 if it only decodes."""
    if not info.prefill_batch:
        return 0.0
    chunks = info.chunk_len[info.decoding_batch :].astype(np.float64)
    depth = info.kv_len[info.decoding_batch :] + chunks
    return float((chunks * (1.0 + depth / CONTEXT_TOKENS)).sum())
