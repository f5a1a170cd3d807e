"""Background requests beside others: who makes room, and who rests.

A request in the foreground that lacks a slot or pages gets those of background requests, which wait
again. What they have computed stays in the prefix index for as long as no other needs the pages.

Where background requests *rest*, they do nothing while a foreground request runs or waits: those
that decode keep their slots and pages for a while, those amid their prompts go back to the queue at
once. On a CPU each row makes a step longer. A step that has only such requests is short, so that a
foreground request that arrives waits little (``chunk_budget.py``). Where they *share*, they decode
beside the others and only rank behind them: on a GPU most of a batch costs nothing.
"""

import time
from collections.abc import Callable

import numpy as np

from rayfin.actors.messages import Int64Array, SchedulerInfo, StepResult
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.microbatches import DecodeMicrobatcher
from rayfin.actors.scheduler.policy.chunk_budget import ChunkBudget
from rayfin.actors.scheduler.policy.step_scheduler import StepScheduler
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.step_builder import Chunk
from rayfin.actors.timing import BACKGROUND_REST_SECONDS

NO_SLOTS: Int64Array = np.zeros(0, np.int64)


class BackgroundScheduler:
    """A scheduler around ``scheduler``; without background requests it only passes on.

    Args:
        budget: of tokens in a step.
        rest: background requests rest while others run; after ``BACKGROUND_REST_SECONDS`` they
            give their slots and pages back.
        clock: seconds.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        scheduler: StepScheduler,
        microbatcher: DecodeMicrobatcher,
        budget: ChunkBudget,
        *,
        rest: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._microbatcher = microbatcher
        self._budget = budget
        self._rest = rest
        self._clock = clock
        self._resting_since: float | None = None

    def depth(self, limit: int) -> int:
        """How many steps may be in flight, up to ``limit``; with stages, each has one."""
        return 1 if limit == 2 and self._budget.alone else limit

    def may_admit(self, request: Request) -> bool:
        """See ``AdmissionGate``: a background request waits if it would rest at once, or if steps
        would become long."""
        if not (request.source.background and self._rest):
            return True
        state = self._lifecycle.state
        if state.waiting.has_foreground:
            return False
        return self._budget.takes_background(len(state.running) // self._microbatcher.turns)

    def schedule(self) -> tuple[Int64Array, list[Chunk]]:
        """See ``StepScheduler``."""
        self._microbatcher.resting = NO_SLOTS
        queue = self._lifecycle.state.waiting
        if not (queue.has_foreground and len(slots := queue.slots)):
            self._resting_since = None
        else:
            self._make_room()
            if self._rest:
                self._stop_prompts(slots)
                self._give_back()
                self._microbatcher.resting = queue.slots
        return self._scheduler.schedule()

    def longest_chunk(self, request: Request) -> int:
        """See ``StepScheduler``."""
        return self._scheduler.longest_chunk(request)

    def observe(self, info: SchedulerInfo, result: StepResult) -> None:
        """See ``StepScheduler``."""
        self._lifecycle.state.prompt_cost.observe(info, result)
        self._scheduler.observe(info, result)

    def _make_room(self) -> None:
        """Preempts background requests until the next foreground request fits."""
        lifecycle, queue = self._lifecycle, self._lifecycle.state.waiting
        request = queue.peek()
        while request is not None and not request.source.background and len(queue.slots):
            # A gate may hold it back for what runs: background requests that rest would never end.
            gated = not queue.runs_foreground and not lifecycle.admission.passes_gates(request)
            if not gated and not lifecycle.admission.lacks_room(request):
                return
            lifecycle.preempt(lifecycle.victim())

    def _give_back(self) -> None:
        """Preempts all background requests that have rested for long."""
        now = self._clock()
        if self._resting_since is None:
            self._resting_since = now
        if now - self._resting_since >= BACKGROUND_REST_SECONDS:
            while len(slots := self._lifecycle.state.waiting.slots):
                self._lifecycle.preempt(int(slots[0]))

    def _stop_prompts(self, slots: Int64Array) -> None:
        running = self._lifecycle.state.running
        for slot in slots.tolist():
            if slot in running.prefilling:
                self._lifecycle.preempt(slot)
