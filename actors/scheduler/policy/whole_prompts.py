"""For encoders: packs whole prompts into a step. Nothing is cached, and no token is sampled."""

import numpy as np

from rayfin.actors.config import BatchLimits
from rayfin.actors.messages import Int64Array, SchedulerInfo, StepResult
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.policy.token_scheduler import take_chunk
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.step_builder import Chunk


class WholePrompts:
    """Fills a step with prompts in the order of the queue, up to ``max_batch_tokens``.

    Attention stays inside each prompt, so prompts of all lengths pack without padding. Each prompt
    takes a slot while it is in flight; its pages are names without memory.
    """

    def __init__(self, lifecycle: Lifecycle, limits: BatchLimits) -> None:
        self._lifecycle = lifecycle
        self._limits = limits

    def schedule(self) -> tuple[Int64Array, list[Chunk]]:
        """Decides the next step: no slot decodes, and every chunk is a whole prompt."""
        lifecycle, budget = self._lifecycle, self._limits.max_batch_tokens
        chunks: list[Chunk] = []
        while len(chunks) < self._limits.max_prefill_batch:
            request = lifecycle.state.waiting.peek()
            if request is None or not lifecycle.can_admit(request, 0):
                break
            if request.num_tokens > budget:
                break
            chunks.append(take_chunk(lifecycle, lifecycle.admit(), budget))
            budget -= chunks[-1].length
        return np.zeros(0, np.int64), chunks

    def longest_chunk(self, request: Request) -> int:
        """A whole step: prompts are not split."""
        return self._limits.max_batch_tokens

    def observe(self, info: SchedulerInfo, result: StepResult) -> None:
        """Does nothing: the runner splits a step that is too large."""
