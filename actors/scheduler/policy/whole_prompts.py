"""Schedulers that split no prompt: that of encoders, and V0."""

import numpy as np

from rayfin.actors.config import BatchLimits
from rayfin.actors.messages import Int64Array, SchedulerInfo, StepResult
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.microbatches import DecodeMicrobatcher
from rayfin.actors.scheduler.policy.token_scheduler import spare_pages, take_chunk
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.step_builder import Chunk


class WholePrompts:
    """Fills a step with prompts in the order of the queue, up to ``max_batch_tokens``.

    For encoders: nothing is cached, and no token is sampled. Attention stays inside each prompt, so
    prompts of all lengths pack without padding. Each prompt takes a slot while it is in flight; its
    pages are names without memory.
    """

    def __init__(self, lifecycle: Lifecycle, limits: BatchLimits) -> None:
        self._lifecycle = lifecycle
        self._limits = limits

    def schedule(self) -> tuple[Int64Array, list[Chunk]]:
        """Decides the next step: no slot decodes, and every chunk is a whole prompt."""
        return np.zeros(0, np.int64), self._admit()

    def longest_chunk(self, request: Request) -> int:
        """Returns a whole step: prompts are not split."""
        return self._limits.max_batch_tokens

    def observe(self, info: SchedulerInfo, result: StepResult) -> None:
        """Does nothing: the runner splits a step that is too large."""

    def _spare(self) -> int:
        """Pages that an admission leaves free."""
        return 0

    def _admit(self) -> list[Chunk]:
        """Admits whole prompts as far as they fit."""
        lifecycle, budget = self._lifecycle, self._limits.max_batch_tokens
        chunks: list[Chunk] = []
        while len(chunks) < self._limits.max_prefill_batch:
            request = lifecycle.state.waiting.peek()
            if request is None or not lifecycle.admission.can_admit(request, self._spare()):
                break
            if lifecycle.admission.num_to_compute(request) > budget:
                break
            chunks.append(take_chunk(lifecycle, lifecycle.admit(), budget))
            budget -= chunks[-1].length
        return chunks


class RequestScheduler(WholePrompts):
    """V0: prefills as many whole prompts as fit in a step, else decodes all running requests.

    Sources: the seed's V0 engine; vLLM V0's scheduler (prefill goes first). Kept because it is the
    simplest correct continuous batching, and to show by measurement what V1 is for.
    """

    def __init__(
        self, lifecycle: Lifecycle, microbatcher: DecodeMicrobatcher, limits: BatchLimits
    ) -> None:
        super().__init__(lifecycle, limits)
        self._microbatcher = microbatcher

    def schedule(self) -> tuple[Int64Array, list[Chunk]]:
        """Decides the next step: either slots that decode, or chunks that are whole prompts."""
        chunks = self._admit()
        if chunks:
            return np.zeros(0, np.int64), chunks
        decoding, _ = self._lifecycle.make_room(self._microbatcher.next_rows())
        return decoding, []

    def _spare(self) -> int:
        return spare_pages(self._lifecycle)
