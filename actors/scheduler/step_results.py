"""What the result of a step changes: tokens, their delivery, and requests that end with them."""

from collections.abc import Callable

import numpy as np

from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.messages import (
    Begun,
    BoolArray,
    Int32Array,
    Int64Array,
    Logprobs,
    StepResult,
)
from rayfin.actors.scheduler import repetition
from rayfin.actors.scheduler.beam_groups import BeamGroups
from rayfin.actors.scheduler.endings import Endings
from rayfin.actors.scheduler.faults.corruption import requests_sharing_failed_pages
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.outbox import Outbox, column_logprobs, compacted
from rayfin.actors.scheduler.policy.multi_step import MultiStepPolicy
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.running_table import RunningTable
from rayfin.actors.scheduler.step_builder import StepRecord


class StepResults:
    """Applies results in the order of their steps."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        endings: Endings,
        outbox: Outbox,
        multi_step: MultiStepPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._lifecycle = lifecycle
        self._endings = endings
        self._outbox = outbox
        self._multi_step = multi_step
        self._clock = clock
        self._beams = BeamGroups(lifecycle)

    def apply(self, record: StepRecord, result: StepResult) -> None:
        """Appends and delivers what a step has sampled, and ends the requests that end with it.

        Raises:
            RunnerGroupFailed: the result is another step's.
        """
        running = self._lifecycle.state.running
        if (result.epoch, result.step) != (record.info.epoch, record.info.step):
            raise RunnerGroupFailed(f"step {record.info.step} was answered by step {result.step}")
        if result.errors:
            state, forget = self._lifecycle.state, self._lifecycle.forget_prefixes
            for request in requests_sharing_failed_pages(state, record, result, forget):
                self._lifecycle.requeue(request)
            self._lifecycle.preemption.clear()
            self._lifecycle.forget_states()
        current = running.admission[record.slots] == record.admissions
        beams = current & running.lockstep[record.slots]
        streams = current & ~beams
        if record.info.prefill_batch:
            failed = np.isin(np.arange(len(current)), list(result.errors))
            self._note_first_tokens(record, current & ~failed)
        for row, logprobs in result.prompt_logprobs.items():
            if streams[row]:
                self._deliver_prompt(running.request(int(record.slots[row])), logprobs)
        sampled = []
        for number, column in enumerate(result.tokens.T):
            rows = streams & (column >= 0)
            tokens = column[rows]
            slots = record.slots[rows]
            self._append(slots, tokens, column_logprobs(result, number, rows))
            sampled.append(len(tokens))
            if self._end_repeating(slots, tokens):
                streams &= running.admission[record.slots] == record.admissions
        for row, vector in result.vectors.items():
            if current[row] and row not in result.errors:
                self._endings.end(running.request(int(record.slots[row])), "stop", vector=vector)
        for row, error in result.errors.items():  # tokens of the steps before it failed are good
            slot = int(record.slots[row])
            if running.admission[slot] == record.admissions[row]:
                self._endings.end(running.request(slot), "error", error=error)
        if beams.any():
            for request in self._beams.apply(record, result):
                self._end_search(request)
        if record.info.grants is not None:
            self._take_back(record, record.info.grants - result.num_tokens)
            whole, more = divmod(sum(sampled), result.num_steps)
            sampled = [whole + (step < more) for step in range(result.num_steps)]
        steps = result.num_steps
        self._multi_step.observe(result.seconds, steps, prefill=record.info.prefill_batch > 0)
        prefill = record.info.num_prefill_tokens
        self._lifecycle.state.counters.step(prefill, sampled, steps, result.seconds)
        for usage in result.usage:
            self._lifecycle.state.counters.used(usage)

    def _take_back(self, record: StepRecord, missing: Int64Array) -> None:
        """Guesses that were wrong, [R] of each row, are not computed: of rows that still run."""
        running = self._lifecycle.state.running
        rows = (running.admission[record.slots] == record.admissions) & (missing > 0)
        running.take_back(record.slots[rows], missing[rows])

    def _note_first_tokens(self, record: StepRecord, good: BoolArray) -> None:
        rows = np.flatnonzero(good & ~record.info.is_decoding & (record.info.last_pos >= 0))
        running = self._lifecycle.state.running
        requests = [running.request(slot) for slot in record.slots[rows].tolist()]
        now = self._clock()
        self._lifecycle.computed(requests, now)
        for request in requests:
            source = request.source
            if source.timed:
                begun = Begun(*request.waits(now), request.cached_tokens)
                self._outbox.begin(source.client, source.key, begun)

    def _append(self, slots: Int64Array, tokens: Int32Array, logprobs: Logprobs | None) -> None:
        """Appends a token [N] to each slot [N], delivers it, ends requests that end with it."""
        running = self._lifecycle.state.running
        running.append(slots, tokens)
        self._lifecycle.state.waiting.sampled(slots)
        self._deliver(slots, tokens, logprobs)
        for request, reason, stop_reason in ended_requests(running, slots, tokens):
            self._endings.end(request, reason, stop_reason)
        self._lifecycle.state.counters.generation_tokens += len(tokens)

    def _end_repeating(self, slots: Int64Array, tokens: Int32Array) -> bool:
        """Ends requests whose outputs repeat themselves with ``tokens`` [N]; False if none does.

        The runner does not know this rule, so it may have sampled past their ends.
        """
        state = self._lifecycle.state
        if not state.repetitions.watched:
            return False
        repeating = list(state.repetitions.repeating(state.running, slots, tokens))
        for request in repeating:
            self._endings.end(request, repetition.REASON, repetition.DETAIL)
        return bool(repeating)

    def _deliver(self, slots: Int64Array, tokens: Int32Array, logprobs: Logprobs | None) -> None:
        running = self._lifecycle.state.running
        owners = running.client[slots]
        for owner in set(owners.tolist()):
            rows = owners == owner
            picked = None if logprobs is None else logprobs.renumbered(compacted(rows))
            owner_slots = slots[rows]
            client = running.request(int(owner_slots[0])).source.client
            self._outbox.tokens(client, running.key[owner_slots], tokens[rows], picked)

    def _deliver_prompt(self, request: Request, logprobs: Logprobs) -> None:
        """Delivers what was not delivered yet: a preempted request computes its prompt again."""
        source = request.source
        numbers = np.arange(len(source.prompt))
        fresh = logprobs.renumbered(np.where(numbers >= request.next_prompt_logprob, numbers, -1))
        if len(fresh.at):
            request.next_prompt_logprob = int(fresh.at[-1]) + 1
            self._outbox.prompt(source.client, source.key, fresh)

    def _end_search(self, request: Request) -> None:
        assert request.search is not None
        hypotheses = request.search.hypotheses
        generated = sum(len(hypothesis.tokens) for hypothesis in hypotheses)
        self._lifecycle.state.counters.generation_tokens += generated
        self._endings.end(request, hypotheses[0].finish_reason, hypotheses=hypotheses)


def ended_requests(
    running: RunningTable, slots: Int64Array, tokens: Int32Array
) -> list[tuple[Request, str, int | None]]:
    """Returns the requests of ``slots`` [N] that end with the tokens [N] just appended.

    Returns:
        (request, finish reason, stop reason) of each. A stop token takes precedence over the
        length, as in vLLM; the stop reason is its id, or None for end of sequence.
    """
    stopped, full = running.stops.ended(slots, tokens, running.num_known[slots])
    ended: list[tuple[Request, str, int | None]] = []
    for row in np.flatnonzero(stopped | full).tolist():
        request, token = running.request(int(slots[row])), int(tokens[row])
        if stopped[row]:
            is_eos = token in request.source.stopping.eos_token_ids
            ended.append((request, "stop", None if is_eos else token))
        else:
            ended.append((request, "length", None))
    return ended
