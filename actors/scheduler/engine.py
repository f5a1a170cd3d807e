"""The engine: schedule, run, update. A plain class; the actor around it only moves messages."""

import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from rayfin.actors.config import EngineConfig
from rayfin.actors.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    RayfinError,
    RequestFailed,
    RequestHandedBack,
    RequestQuarantined,
    RunnerGroupFailed,
)
from rayfin.actors.messages import (
    Begun,
    BoolArray,
    Command,
    Ended,
    EngineRequest,
    Float32Array,
    Hypothesis,
    Int32Array,
    Int64Array,
    Logprobs,
    SchedulerInfo,
    StepResult,
    TokenDeltas,
    TokenLog,
)
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.metrics.snapshot import EngineSnapshot
from rayfin.actors.scheduler import repetition
from rayfin.actors.scheduler.beam_groups import BeamGroups, as_it_runs
from rayfin.actors.scheduler.cached_prefix import find_fork_parent
from rayfin.actors.scheduler.executor import Executor
from rayfin.actors.scheduler.faults.corruption import requests_sharing_failed_pages
from rayfin.actors.scheduler.faults.quarantine import SAME_PROMPT, Quarantine
from rayfin.actors.scheduler.faults.token_logs import TokenLogs
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.microbatches import DecodeMicrobatcher
from rayfin.actors.scheduler.outbox import Outbox, column_logprobs, compacted
from rayfin.actors.scheduler.page_tier import make_tier
from rayfin.actors.scheduler.part_gate import PartGate
from rayfin.actors.scheduler.policy.background import BackgroundScheduler
from rayfin.actors.scheduler.policy.chunk_budget import ChunkBudget
from rayfin.actors.scheduler.policy.multi_step import make_multi_step
from rayfin.actors.scheduler.policy.request_scheduler import RequestScheduler
from rayfin.actors.scheduler.policy.step_scheduler import StepScheduler
from rayfin.actors.scheduler.policy.token_scheduler import TokenScheduler
from rayfin.actors.scheduler.policy.whole_prompts import WholePrompts
from rayfin.actors.scheduler.preempted_pages import make_preemption
from rayfin.actors.scheduler.queues.background_queue import BackgroundQueue
from rayfin.actors.scheduler.queues.deadlines import Deadlines, exceeded
from rayfin.actors.scheduler.queues.preparation import Preparations
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import make_state
from rayfin.actors.scheduler.stats import take_snapshot, take_stats
from rayfin.actors.scheduler.step_builder import StepRecord
from rayfin.actors.scheduler.step_pipeline import StepPipeline
from rayfin.actors.scheduler.stopping import ended_requests
from rayfin.cache.prefix_index import HashChain

MAX_RESTARTS_WITHOUT_PROGRESS = 8


def make_scheduler(
    config: EngineConfig,
    lifecycle: Lifecycle,
    microbatcher: DecodeMicrobatcher,
    beside: ChunkBudget,
) -> StepScheduler:
    """What decides the steps of such an engine; ``beside`` limits those of its V1."""
    if config.whole_prompts:
        return WholePrompts(lifecycle, config.limits)
    if config.scheduler == "v0":
        return RequestScheduler(lifecycle, microbatcher, config.limits)
    longest = config.long_prefill_token_threshold
    return TokenScheduler(lifecycle, microbatcher, config.limits, longest, beside, config.uncut)


def make_budget(config: EngineConfig, waiting: BackgroundQueue, *, rest: bool) -> ChunkBudget:
    """Limits steps beside streams, and those of background requests that rest beside others."""

    def only_background() -> bool:
        return rest and not waiting.has_foreground

    return ChunkBudget(config.itl_target, config.limits.max_batch_tokens, only_background)


class Engine:
    """All requests of one model replica, and the loop over them.

    Single-threaded: one caller drives ``add``, ``abort`` and ``step``. ``clock`` returns seconds; a
    simulator passes a fake one. ``lease_seconds``: see ``MultiStepPolicy``.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        lease_seconds: float | None = None,
    ) -> None:
        self.config = config
        state = make_state(config)
        preparations = Preparations(executor, clock, state.counters.preparation)
        tier = make_tier(config, state, executor, clock)
        self.lifecycle = Lifecycle(state, make_preemption(config, state), preparations, clock, tier)
        self._clock = clock
        self._deadlines = Deadlines()
        microbatcher = DecodeMicrobatcher(state.running, max(config.steps_in_flight - 1, 1))
        rest = config.batch_mode == "idle"
        budget = make_budget(config, state.waiting, rest=rest)
        steps = make_scheduler(config, self.lifecycle, microbatcher, budget)
        scheduler = BackgroundScheduler(
            self.lifecycle, steps, microbatcher, budget, rest=rest, clock=clock
        )
        parts = PartGate(state.running, config.parts)

        def depth() -> int:
            return scheduler.depth(config.steps_in_flight)

        self._quarantine = Quarantine(self.lifecycle, scheduler, parts, depth, clock)
        self.lifecycle.gates = [self._quarantine, parts, scheduler]
        self._beams = BeamGroups(self.lifecycle)
        self._multi_step = make_multi_step(state, microbatcher, config, lease_seconds)
        self._pipeline = StepPipeline(state, executor, clock)
        self._outbox = Outbox()
        self._logs = TokenLogs(clock)
        self._draining = self._asleep = False
        self._last_progress = clock()
        self._last_step: SchedulerInfo | None = None
        self._restarts_without_progress = 0

    @property
    def state(self) -> Literal["serving", "draining", "asleep"]:
        """A draining engine accepts no requests and finishes those in the foreground; an asleep one
        runs none.

        An engine that was draining before it slept drains again when it wakes.
        """
        return "asleep" if self._asleep else "draining" if self._draining else "serving"

    @property
    def has_work(self) -> bool:
        return bool(self.lifecycle.state.live or self._pipeline) and not self._asleep

    @property
    def has_steps(self) -> bool:
        """Whether it has work of which not all waits for preparation, or for pages of a disk."""
        state, preparations, tier = (
            self.lifecycle.state,
            self.lifecycle.preparations,
            self.lifecycle.tier,
        )
        # Where nothing runs, pages on their way may be what the first in the queue waits for.
        held_up = tier.is_busy and not len(state.running) and self._is_held_up()
        ready = len(state.live) > len(preparations) + len(tier) and not held_up
        return (ready or bool(self._pipeline)) and not self._asleep

    def _is_held_up(self) -> bool:
        first = self.lifecycle.state.waiting.peek()
        lifecycle = self.lifecycle
        return first is not None and (lifecycle.lacks_room(first) or lifecycle.overtakes(first))

    def add(self, source: EngineRequest) -> None:
        """Puts a request into the queue.

        Raises:
            InvalidRequest: its tokens do not fit, its key is in use, its timeout is not positive,
                or its fork parent has another prompt.
            Overloaded: the queue is full.
            RequestHandedBack: the engine drains or sleeps.
            RequestQuarantined: its prompt has killed runners.
        """
        try:
            self._validate_and_enqueue(source)
        except RayfinError as error:
            self.lifecycle.state.counters.refused(error)
            raise

    def _validate_and_enqueue(self, source: EngineRequest) -> None:
        if self.state != "serving":
            raise RequestHandedBack("this engine takes no more requests")
        state, key = self.lifecycle.state, (source.client, source.key)
        if key in state.live:
            raise InvalidRequest(f"request key {source.key} is in use", "request_id")
        longest = len(source.prompt) + source.stopping.max_tokens
        if not len(source.prompt) or longest > self.config.max_model_len:
            raise ContextLengthExceeded(
                f"the request takes up to {longest} tokens, of at most {self.config.max_model_len}",
                "prompt",
            )
        if source.samples and len(source.output) >= source.stopping.max_tokens:
            raise InvalidRequest("the request has all of its tokens already", "max_tokens")
        if source.timeout is not None and not source.timeout > 0:
            raise InvalidRequest(f"timeout must be over 0 s, got {source.timeout}", "timeout")
        for part in source.parts:
            part.check(self.config.parts)
        self._quarantine.check(source)
        now, ended = self._clock(), sum(state.counters.finished.values())
        state.completion_rate.observe(now, ended)
        limits = state.queue_limits
        if not (source.output or source.background):  # with output, another engine had admitted it
            retry_after = state.completion_rate.seconds_until_half(limits.num_requests, now, ended)
            limits.check(len(source.prompt), retry_after)
        if source.beams is not None:
            source = as_it_runs(source, self.config)
        fork_parent = find_fork_parent(source, state.live)
        if not self.has_work:
            self._last_progress = now
        chain = HashChain(self.config.page_size, source.prefix_keys)
        output = np.array(source.output, np.int32)
        request = Request(source, state.arrivals, now, chain, output, fork_parent=fork_parent)
        if self.config.prefix_caching:
            chain.extend(source.prompt)
        state.arrivals += 1
        state.live[key] = request
        self.lifecycle.enqueue(request)
        self._quarantine.watch(request)
        self._deadlines.watch(request)
        state.repetitions.watch(request)
        state.counters.prompt_tokens += len(source.prompt)

    def abort(self, client: str, key: int, reason: str = "abort") -> None:
        """Ends a request; its pages are free before the next step. Unknown keys are ignored.

        Args:
            reason: what it is counted under; "stop" if its client has found a stop string.
        """
        request = self.lifecycle.state.live.pop((client, key), None)
        if request is not None:
            self._deadlines.discard(request)
            self._quarantine.discard(request)
            self.lifecycle.state.repetitions.discard(request)
            self.lifecycle.finish(request, reason)
            self._logs.keep(request)

    def abort_client(self, client: str) -> None:
        """Aborts all requests of a client."""
        for owner, key in list(self.lifecycle.state.live):
            if owner == client:
                self.abort(owner, key)

    def recall(self, tenant: str, request_ids: Sequence[str]) -> list[TokenLog | None]:
        """Returns the delivered tokens of the tenant's requests; aborts those that still run."""
        wanted = set(request_ids)
        for request in list(self.lifecycle.state.live.values()):
            if request.source.request_id in wanted and request.source.tenant == tenant:
                self._end(request, "abort")
        return [self._logs.find(tenant, request_id) for request_id in request_ids]

    def carry_out(self, command: Command) -> None:
        """Carries out an operator's command.

        Raises:
            EngineUnavailable: the command failed.
        """
        match command:
            case Command.DRAIN:
                self.drain()
            case Command.ADMIT:
                self.admit_again()
            case Command.RESET_CACHE:
                self.forget_prefixes()
            case Command.SLEEP:
                self.sleep()
            case Command.WAKE:
                self.wake()

    def drain(self) -> None:
        """Accepts no more requests; those in the foreground may finish.

        Background requests are handed back at once, for they would hold the drain up.
        """
        self._draining = True
        moved = RequestHandedBack("this engine drains")
        for request in list(self.lifecycle.state.live.values()):
            if request.source.background:
                self._end(request, "error", error=moved)

    def admit_again(self) -> None:
        """Ends a drain."""
        self._draining = False

    def forget_prefixes(self) -> None:
        """Resets the prefix cache."""
        self.lifecycle.forget_prefixes()
        self.lifecycle.tier.forget()

    def sleep(self) -> None:
        """Frees all pages and the runners' memory of them; all requests wait for ``wake``.

        Raises:
            EngineUnavailable: the runners died and were replaced; the engine is awake.
        """
        if self._asleep:
            return
        try:
            while self._pipeline:
                self._update_from_oldest()
            self._pipeline.sleep()
        except RunnerGroupFailed as failure:
            self._recover(failure)
            raise EngineUnavailable(f"it does not sleep: {failure}") from failure
        self.lifecycle.restart()
        self._asleep = True

    def wake(self) -> None:
        """Allocates pages again and resumes all requests."""
        if not self._asleep:
            return
        self._asleep = False
        self._last_progress = self._clock()
        try:
            self._pipeline.wake()
            self.lifecycle.resume()
        except RunnerGroupFailed as failure:
            self._recover(failure)

    def replace_runners(self, failure: RunnerGroupFailed) -> None:
        """Replaces runners that died while the engine was idle.

        Raises:
            RunnerGroupFailed: the new ones cannot be started.
        """
        self._recover(failure)

    def step(self) -> dict[str, TokenDeltas]:
        """Schedules and submits until the pipeline is full, then processes its oldest result.

        Returns:
            Output by client; empty if nothing was sampled and no request ended.
        """
        self._expire()
        self._leave_preparations()
        if self._asleep:
            return self._drain_outbox()
        try:
            while len(self._pipeline) < self._quarantine.depth:
                decoding, chunks = self._quarantine.schedule()
                num_steps = 1 if chunks else self._multi_step.grant(decoding)
                grants = self._multi_step.grants(decoding, num_steps)
                if not self._pipeline.submit(decoding, chunks, num_steps, grants):
                    break
            if self._pipeline:
                self._update_from_oldest()
        except RunnerGroupFailed as failure:
            self._recover(failure)
        return self._drain_outbox()

    def fail_all(self, error: RayfinError) -> dict[str, TokenDeltas]:
        """Ends every request with ``error``; returns the output by client."""
        for request in list(self.lifecycle.state.live.values()):
            self._end(request, "error", error=error)
        return self._drain_outbox()

    def stats(self) -> EngineStats:
        """A snapshot of the counters; cheap, and safe to take from another thread."""
        return take_stats(
            self.config,
            self.lifecycle,
            suspects=self._quarantine.num_suspects,
            epoch=self._pipeline.epoch,
            draining=self._draining,
            asleep=self._asleep,
            seconds_since_progress=self._clock() - self._last_progress if self.has_work else 0.0,
        )

    def snapshot(self, name: str) -> EngineSnapshot:
        """Running and waiting requests and page owners; for the thread that steps."""
        return take_snapshot(
            name, self.lifecycle.state, self.stats(), self._last_step, self._clock()
        )

    def check_integrity(self) -> None:
        """Checks the cache's invariants, and that an idle engine holds no pages.

        Raises:
            CacheError: an invariant is broken.
        """
        tables, preemption = self.lifecycle.state.tables, self.lifecycle.preemption
        tables.check_integrity()
        preemption.check_integrity()
        held = tables.num_held + preemption.num_held
        assert self.has_work or held == 0, "idle, and pages are held"

    def _drain_outbox(self) -> dict[str, TokenDeltas]:
        return self._outbox.drain(self._pipeline.epoch, self.lifecycle.state.counters.steps)

    def _update_from_oldest(self) -> None:
        record, result = self._pipeline.wait()
        self._update(record, result)
        # A step whose result does not fit stays in flight, so that its requests become suspects.
        self._pipeline.pop()

    def _update(self, record: StepRecord, result: StepResult) -> None:
        running = self.lifecycle.state.running
        if (result.epoch, result.step) != (record.info.epoch, record.info.step):
            raise RunnerGroupFailed(f"step {record.info.step} was answered by step {result.step}")
        if result.errors:
            for request in requests_sharing_failed_pages(self.lifecycle.state, record, result):
                self.lifecycle.requeue(request)
            self.lifecycle.preemption.clear()
            self.lifecycle.forget_states()
        current = running.admission[record.slots] == record.admissions
        streams = current & ~running.lockstep[record.slots]
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
                self._end(running.request(int(record.slots[row])), "stop", vector=vector)
        for row, error in result.errors.items():  # tokens of the steps before it failed are good
            slot = int(record.slots[row])
            if running.admission[slot] == record.admissions[row]:
                self._end(running.request(slot), "error", error=error)
        for request in self._beams.apply(record, result):
            self._end_search(request)
        if record.info.grants is not None:
            self._take_back(record, record.info.grants - result.num_tokens)
            whole, more = divmod(sum(sampled), result.num_steps)
            sampled = [whole + (step < more) for step in range(result.num_steps)]
        steps = result.num_steps
        self._multi_step.observe(result.seconds, steps, prefill=record.info.prefill_batch > 0)
        prefill = record.info.num_prefill_tokens
        self.lifecycle.state.counters.step(prefill, sampled, steps, result.seconds)
        for usage in result.usage:
            self.lifecycle.state.counters.used(usage)
        self._last_step = record.info
        self._last_progress = self._clock()
        self._restarts_without_progress = 0
        self._quarantine.observe(record.info, result)

    def _take_back(self, record: StepRecord, missing: Int64Array) -> None:
        """Guesses that were wrong, [R] of each row, are not computed: of rows that still run."""
        running = self.lifecycle.state.running
        rows = (running.admission[record.slots] == record.admissions) & (missing > 0)
        running.take_back(record.slots[rows], missing[rows])

    def _note_first_tokens(self, record: StepRecord, good: BoolArray) -> None:
        rows = np.flatnonzero(good & ~record.info.is_decoding & (record.info.last_pos >= 0))
        running = self.lifecycle.state.running
        requests = [running.request(slot) for slot in record.slots[rows].tolist()]
        now = self._clock()
        self.lifecycle.computed(requests, now)
        for request in requests:
            source = request.source
            if source.timed:
                begun = Begun(*request.waits(now), request.cached_tokens)
                self._outbox.begin(source.client, source.key, begun)

    def _expire(self) -> None:
        """Ends requests whose deadline has passed, and pins whose time is over."""
        now = self._clock()
        self.lifecycle.state.tables.expire_pins(now)
        for request in self._deadlines.take_due(now):
            self._end(request, "error", error=exceeded(request, now))

    def _leave_preparations(self) -> None:
        """Moves requests into the queue that have what they waited for; ends those that fail."""
        for request, error in self.lifecycle.preparations.leaving():
            if error is None:
                self.lifecycle.queue(request)
            else:
                self._end(request, "error", error=error)
        for request in self.lifecycle.tier.leaving():
            self.lifecycle.queue(request)

    def _append(self, slots: Int64Array, tokens: Int32Array, logprobs: Logprobs | None) -> None:
        """Appends a token [N] to each slot [N], delivers it, ends requests that end with it."""
        running = self.lifecycle.state.running
        running.append(slots, tokens)
        self.lifecycle.state.waiting.sampled(slots)
        self._deliver(slots, tokens, logprobs)
        for request, reason, stop_reason in ended_requests(running, slots, tokens):
            self._end(request, reason, stop_reason)
        self.lifecycle.state.counters.generation_tokens += len(tokens)

    def _end_repeating(self, slots: Int64Array, tokens: Int32Array) -> bool:
        """Ends requests whose outputs repeat themselves with ``tokens`` [N]; False if none does.

        The runner does not know this rule, so it may have sampled past their ends.
        """
        state = self.lifecycle.state
        if not state.repetitions:
            return False
        repeating = list(state.repetitions.repeating(state.running, slots, tokens))
        for request in repeating:
            self._end(request, repetition.REASON, repetition.DETAIL)
        return bool(repeating)

    def _deliver(self, slots: Int64Array, tokens: Int32Array, logprobs: Logprobs | None) -> None:
        running = self.lifecycle.state.running
        owners = running.client[slots]
        for owner in set(owners.tolist()):
            rows = owners == owner
            picked = None if logprobs is None else logprobs.renumbered(compacted(rows))
            own = slots[rows]
            client = running.request(int(own[0])).source.client
            self._outbox.tokens(client, running.key[own], tokens[rows], picked)

    def _deliver_prompt(self, request: Request, logprobs: Logprobs) -> None:
        """Delivers what was not delivered yet: a preempted request computes its prompt again."""
        source = request.source
        numbers = np.arange(len(source.prompt))
        fresh = logprobs.renumbered(np.where(numbers >= request.next_prompt_logprob, numbers, -1))
        if len(fresh.at):
            request.next_prompt_logprob = int(fresh.at[-1]) + 1
            self._outbox.prompt(source.client, source.key, fresh)

    def _end(
        self,
        request: Request,
        reason: str,
        stop_reason: int | str | None = None,
        error: RayfinError | None = None,
        hypotheses: Sequence[Hypothesis] = (),
        vector: Float32Array | None = None,
    ) -> None:
        source = request.source
        del self.lifecycle.state.live[source.client, source.key]
        self._deadlines.discard(request)
        self._quarantine.discard(request)
        self.lifecycle.state.repetitions.discard(request)
        moved = isinstance(error, RequestHandedBack)
        spoiled = isinstance(error, RequestFailed)
        self.lifecycle.finish(request, "moved" if moved else reason, spoiled=spoiled)
        if error is not None and not moved:
            self.lifecycle.state.counters.failure(error)
        if error is None:
            self._logs.keep(request, None if reason == "abort" else reason, stop_reason)
        cached = request.cached_tokens
        self._outbox.end(
            source.client,
            Ended(
                *(source.key, reason, stop_reason, error, cached, list(hypotheses)),
                *(request.deaths, *request.waits(self._clock()), vector),
            ),
        )

    def _end_search(self, request: Request) -> None:
        assert request.search is not None
        hypotheses = request.search.hypotheses
        generated = sum(len(hypothesis.tokens) for hypothesis in hypotheses)
        self.lifecycle.state.counters.generation_tokens += generated
        self._end(request, hypotheses[0].finish_reason, hypotheses=hypotheses)

    def _recover(self, failure: RunnerGroupFailed) -> None:
        """Replaces the runners, and requeues all that ran to recompute it from its token log.

        Raises:
            RunnerGroupFailed: they failed ``MAX_RESTARTS_WITHOUT_PROGRESS`` times without a step.
        """
        blocked = self._quarantine.died(
            self._pipeline.requests(), caused_by_step=failure.caused_by_step
        )
        if blocked is not None:
            self._restarts_without_progress = 0
            self._end(blocked, "error", error=self._quarantine.block(blocked))
            live = list(self.lifecycle.state.live.values())
            for request in self._quarantine.same_prompt(blocked, live):
                self._end(request, "error", error=RequestQuarantined(SAME_PROMPT))
        self._pipeline.clear()
        self.lifecycle.restart()
        while True:
            self._restarts_without_progress += 1
            if self._restarts_without_progress > MAX_RESTARTS_WITHOUT_PROGRESS:
                raise failure
            try:
                self._pipeline.restart(asleep=self._asleep)
                break
            except RunnerGroupFailed as again:
                failure = again
        self.lifecycle.state.counters.runner_restarts += 1
        self.lifecycle.resume()
