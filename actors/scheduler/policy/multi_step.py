"""How many decode steps one call may run: enough to hide the call, few enough to stay responsive.

A Ray call costs about a millisecond (benchmarks/channel.py), a decode step of a small model as
little. In steady decode a SchedulerInfo is therefore a *lease*: the runner runs ``num_steps`` steps
back to back on pages that are reserved for all of them, ends each row at its own stop token or
limit, and answers once.
"""

import math

import numpy as np

from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.core.microbatches import DecodeMicrobatcher
from rayfin.actors.scheduler.core.scheduler_state import SchedulerState

CALL_SECONDS = 0.0012
CALLS_OF_WORK = 4
"""A lease works for about this many calls' time: longer ones would delay who comes next."""

SMOOTHING = 0.2


class MultiStepPolicy:
    """Picks the next lease from the measured time of a step."""

    def __init__(self, state: SchedulerState, microbatcher: DecodeMicrobatcher, most: int) -> None:
        self._state = state
        self._microbatcher = microbatcher
        self._most = most
        self._step_seconds: float | None = None
        self._measured = False  # by a step that only decodes

    def observe(self, seconds: float, steps: int, *, prefill: bool = False) -> None:
        """A call of ``steps`` steps took the runner ``seconds``.

        One with prompts in it says only that a decode step takes no longer.
        """
        step = seconds / steps
        known = self._step_seconds
        if prefill or not self._measured:
            self._step_seconds = step if known is None else min(known, step)
        elif known is not None:
            self._step_seconds = known + SMOOTHING * (step - known)
        self._measured |= not prefill

    def grant(self, decoding: Int64Array) -> int:
        """Steps for the slots of ``decoding`` [N], with pages reserved for all of them.

        1 when somebody waits, is in the middle of a prompt or in lockstep, when others decode
        meanwhile in other stages of a pipeline, and when pages are short: a lease preempts nobody,
        and one that does not fit takes nothing.
        """
        running, tables = self._state.running, self._state.tables
        busy = len(self._state.waiting) or running.prefilling or running.lockstep.any()
        busy = busy or self._microbatcher.alternate
        if self._most == 1 or busy or not self._step_seconds or not len(decoding):
            return 1
        num_steps = math.ceil(CALL_SECONDS * CALLS_OF_WORK / self._step_seconds)
        longest = int(running.room(decoding).max())
        num_steps = max(1, min(num_steps, self._most, longest))
        ends = running.num_computed[decoding] + np.minimum(num_steps, running.room(decoding))
        missing = -(-ends // tables.page_size) - tables.held[decoding]
        crossing = missing > 0
        if missing[crossing].sum() > tables.pool.num_free:
            return 1
        for slot, end in zip(decoding[crossing].tolist(), ends[crossing].tolist(), strict=True):
            tables.grow(slot, end)
        return num_steps
