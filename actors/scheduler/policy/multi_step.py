"""How many decode steps one call may run, and how many drafts each row may have in them.

Steps are enough to hide the call, and few enough to stay responsive.

A Ray call costs about a millisecond (benchmarks/hops.py channel), a decode step of a small model
hardly more. In steady decode one call therefore runs ``num_steps`` steps back to back on pages that
are reserved for all of them, ends each row at its stop token or cap, and answers once.
"""

import math

import numpy as np

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.microbatches import DecodeMicrobatcher
from rayfin.actors.scheduler.scheduler_state import SchedulerState

CALL_SECONDS = 0.0012
CALLS_OF_WORK = 4
"""A call computes for about the time of so many calls; more would delay the next arrival."""

SMOOTHING = 0.2


class DraftPolicy:
    """Grants each decoding row up to ``max_drafts`` in each decode step of a call.

    The scheduler counts them, the runner proposes them.
    """

    def __init__(self, state: SchedulerState, max_drafts: int) -> None:
        self._state = state
        self._max_drafts = max_drafts

    def grant(self, decoding: Int64Array, num_steps: int) -> Int64Array | None:
        """Most tokens [D] of a call for the slots of ``decoding`` [D], with pages for all of them.

        None in an engine without drafts. No draft preempts a request: if too few pages would stay
        free for each request to grow, no row has any. The runner puts fewer drafts into a step than
        granted, as its memory and the time of a step allow.
        """
        if not self._max_drafts or not len(decoding):
            return None
        running, tables = self._state.running, self._state.tables
        room = running.room(decoding)
        # The step behind this one is scheduled before its answer: it finds room for its tokens.
        ahead = np.maximum(room - num_steps, np.minimum(room, num_steps))
        grants = np.minimum(ahead, num_steps * (1 + self._max_drafts))
        grants[running.lockstep[decoding]] = 1
        ends = running.num_computed[decoding] + grants
        missing = -(-ends // tables.page_size) - tables.held[decoding]
        crossing = missing > 0
        if missing[crossing].sum() + len(running) > tables.num_free_entries:
            return np.minimum(room, num_steps)
        for slot, end in zip(decoding[crossing].tolist(), ends[crossing].tolist(), strict=True):
            tables.grow(slot, end)
        return grants


class MultiStepPolicy:
    """Picks the number of steps from the measured time of a step.

    A call computes for about ``lease_seconds``; None: for ``CALLS_OF_WORK``.
    """

    def __init__(
        self,
        state: SchedulerState,
        microbatcher: DecodeMicrobatcher,
        max_steps: int,
        drafts: DraftPolicy,
        lease_seconds: float | None = None,
    ) -> None:
        self._drafts = drafts  # what rows may gain beside a token in each step
        self._state = state
        self._microbatcher = microbatcher
        self._max_steps = max_steps
        self._lease_seconds = lease_seconds
        self._step_seconds: float | None = None
        self._measured = False  # by a step that only decodes

    def observe(self, seconds: float, steps: int, *, prefill: bool = False) -> None:
        """A call of ``steps`` steps took the runner ``seconds``.

        One with prompts gives only an upper bound of a decode step.
        """
        step = seconds / steps
        known = self._step_seconds
        if prefill or not self._measured:
            self._step_seconds = step if known is None else min(known, step)
        elif known is not None:
            self._step_seconds = known + SMOOTHING * (step - known)
        self._measured |= not prefill

    def grants(self, decoding: Int64Array, num_steps: int) -> Int64Array | None:
        """See ``DraftPolicy.grant``."""
        return self._drafts.grant(decoding, num_steps)

    def grant(self, decoding: Int64Array) -> int:
        """Steps for the slots of ``decoding`` [N], with pages reserved for all of them.

        Returns 1 if a request waits, computes its prompt or is in lockstep, if other microbatches
        decode meanwhile, and if pages are short: multi-step decoding never preempts, and reserves
        no page unless all fit.
        """
        running, tables = self._state.running, self._state.tables
        if self._max_steps == 1 or not self._step_seconds or not len(decoding):
            return 1
        busy = len(self._state.waiting) or running.prefilling or running.lockstep.any()
        if busy or self._microbatcher.alternate:
            return 1
        seconds = self._lease_seconds or CALL_SECONDS * CALLS_OF_WORK
        num_steps = math.ceil(seconds / self._step_seconds)
        longest = int(running.room(decoding).max())
        num_steps = max(1, min(num_steps, self._max_steps, longest))
        ends = running.num_computed[decoding] + np.minimum(num_steps, running.room(decoding))
        missing = -(-ends // tables.page_size) - tables.held[decoding]
        crossing = missing > 0
        if missing[crossing].sum() > tables.num_free_entries:
            return 1
        for slot, end in zip(decoding[crossing].tolist(), ends[crossing].tolist(), strict=True):
            tables.grow(slot, end)
        return num_steps


def make_multi_step(
    state: SchedulerState,
    microbatcher: DecodeMicrobatcher,
    config: EngineConfig,
    lease_seconds: float | None,
) -> MultiStepPolicy:
    """Makes the policy of an engine."""
    drafts = DraftPolicy(state, config.num_speculative_tokens)
    return MultiStepPolicy(state, microbatcher, config.max_lease, drafts, lease_seconds)
