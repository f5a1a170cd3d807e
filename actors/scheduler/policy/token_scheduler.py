"""V1: schedules tokens. Decoding rows and parts of prompts share every step (chunked prefill).

Sources: the seed's V1 ``get_requests``; vLLM V1's one-counter scheduler; Sarathi-Serve's
decode-first token budget.
"""

from rayfin.actors.config import BatchLimits
from rayfin.actors.messages import Int64Array, SchedulerInfo, StepResult
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.microbatches import DecodeMicrobatcher
from rayfin.actors.scheduler.policy.chunk_budget import ChunkBudget
from rayfin.actors.scheduler.policy.span_budget import SpanBudget
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.step_builder import Chunk
from rayfin.actors.settings.bidirectional import ANY, Bidirectional

LEAST_BUDGET = 32
"""The budget is not reduced below so many tokens."""

RECOVERY_STEPS = 1000
"""Steps until the whole budget is used again after one that ran out of memory."""


class TokenScheduler:
    """Fills a step of ``max_batch_tokens``: decoding rows, then running prompts, then new requests.

    A prompt gets at most ``long_prefill`` tokens of a step (0: no limit), so that prompts
    behind a long one share its steps (vLLM's ``long_prefill_token_threshold``). Beside streams,
    and where only background requests run, prompts get no more than ``chunk_budget`` allows.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        microbatcher: DecodeMicrobatcher,
        limits: BatchLimits,
        long_prefill: int = 0,
        chunk_budget: ChunkBudget | None = None,
        uncut: Bidirectional = ANY,
    ) -> None:
        self._lifecycle = lifecycle
        self._microbatcher = microbatcher
        self._limits = limits
        self._longest_chunk = long_prefill or limits.max_batch_tokens
        self._chunk_budget = chunk_budget or ChunkBudget(None, limits.max_batch_tokens)
        self._spans = SpanBudget(limits.max_batch_tokens, uncut)
        self._budget = limits.max_batch_tokens  # of a step, less after one that ran out of memory

    def schedule(self) -> tuple[Int64Array, list[Chunk]]:
        """Decides the next step: slots that decode, then chunks of prompts."""
        decoding, preempted = self._lifecycle.make_room(self._microbatcher.next_rows())
        budget = self._chunk_budget.limit(len(decoding), self._budget - len(decoding))
        self._spans.begin(len(decoding))
        chunks = self._continue_prompts(budget)
        if not preempted:
            self._admit(budget - sum(chunk.length for chunk in chunks), chunks)
        return decoding, chunks

    def longest_chunk(self, request: Request) -> int:
        """Most tokens of the request's prompt in a step that computes nothing else."""
        longest = self._max_chunk(request, self._budget, [])
        if request.slot is None:
            return longest
        computed = int(self._lifecycle.state.running.num_computed[request.slot])
        return self._spans.whole(request, computed, longest, self._limits.max_batch_tokens)

    def observe(self, info: SchedulerInfo, result: StepResult) -> None:
        """Halves the budget if a step ran out of memory; else raises it slowly to the limit."""
        self._chunk_budget.observe(info, result)
        if result.out_of_memory:
            self._budget = max(self._budget // 2, min(LEAST_BUDGET, self._limits.max_batch_tokens))
        elif self._budget < self._limits.max_batch_tokens:
            back = self._limits.max_batch_tokens // RECOVERY_STEPS + 1
            self._budget = min(self._budget + back, self._limits.max_batch_tokens)

    def _continue_prompts(self, budget: int) -> list[Chunk]:
        running = self._lifecycle.state.running
        chunks: list[Chunk] = []
        for slot in running.prefilling:
            if budget <= 0 or len(chunks) == self._limits.max_prefill_batch:
                break
            if length := self._max_chunk(running.request(slot), budget, chunks):
                budget -= self._take(slot, length, chunks)
        return chunks

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        """Admits waiting requests while tokens, rows, slots and pages last."""
        lifecycle = self._lifecycle
        while budget > 0 and len(chunks) < self._limits.max_prefill_batch:
            request = lifecycle.state.waiting.peek()
            spare = spare_pages(lifecycle)
            if request is None or not lifecycle.admission.can_admit(request, spare):
                return
            if not (length := self._max_chunk(request, budget, chunks)):
                return
            if not self._spans.allows(request):
                return
            budget -= self._take(lifecycle.admit(), length, chunks)

    def _take(self, slot: int, length: int, chunks: list[Chunk]) -> int:
        """Adds a chunk of up to ``length`` tokens of the slot's prompt; returns its tokens."""
        running = self._lifecycle.state.running
        request, computed = running.request(slot), int(running.num_computed[slot])
        length = self._spans.cap(request, computed, length)
        if length <= 0:
            return 0
        chunks.append(take_chunk(self._lifecycle, slot, length))
        self._spans.take(request, computed, chunks[-1].length)
        return chunks[-1].length

    def _max_chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """Most tokens of the request's prompt that a step with these ``chunks`` may compute."""
        longest = min(budget, self._longest_chunk)
        if not request.scoring:
            return longest
        # A scored prompt needs the logits of all of its tokens. Memory was measured with logits of
        # ``max_decoding_batch`` tokens, which all such chunks of a step share.
        running = self._lifecycle.state.running
        scored = sum(c.length for c in chunks if running.request(c.slot).scoring)
        return min(longest, self._limits.max_decoding_batch - scored)


def take_chunk(lifecycle: Lifecycle, slot: int, budget: int) -> Chunk:
    """Returns up to ``budget`` tokens of the slot's prompt, and lets others share their pages."""
    # Even requests of the same step may share them: a layer writes the keys and values of all rows
    # before any row reads them.
    running = lifecycle.state.running
    computed = int(running.num_computed[slot])
    length = min(lifecycle.save_state(slot) - computed, budget)
    lifecycle.publish(slot, computed + length)
    return Chunk(slot, length)


def spare_pages(lifecycle: Lifecycle) -> int:
    """Pages to leave free at an admission, so that running requests do not preempt it at once."""
    return lifecycle.state.tables.pool.num_pages // 100 if len(lifecycle.state.running) else 0
