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
    RequestHandedBack,
    RequestQuarantined,
    RunnerGroupFailed,
)
from rayfin.actors.messages import (
    Command,
    EngineRequest,
    SchedulerInfo,
    TokenDeltas,
    TokenLog,
)
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.metrics.snapshot import EngineSnapshot
from rayfin.actors.scheduler.admission import PartGate, own_gates
from rayfin.actors.scheduler.beam_groups import as_it_runs
from rayfin.actors.scheduler.cached_prefix import find_fork_parent
from rayfin.actors.scheduler.endings import Endings
from rayfin.actors.scheduler.executor import Executor
from rayfin.actors.scheduler.faults.quarantine import SAME_PROMPT, Quarantine
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.microbatches import DecodeMicrobatcher
from rayfin.actors.scheduler.outbox import Outbox
from rayfin.actors.scheduler.page_tier import make_tier
from rayfin.actors.scheduler.policy.background import BackgroundScheduler
from rayfin.actors.scheduler.policy.chunk_budget import ChunkBudget
from rayfin.actors.scheduler.policy.multi_step import make_multi_step
from rayfin.actors.scheduler.policy.step_scheduler import StepScheduler
from rayfin.actors.scheduler.policy.token_scheduler import TokenScheduler
from rayfin.actors.scheduler.policy.whole_prompts import RequestScheduler, WholePrompts
from rayfin.actors.scheduler.preempted_pages import make_preemption
from rayfin.actors.scheduler.queues.background_queue import BackgroundQueue
from rayfin.actors.scheduler.queues.preparation import Preparations
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import make_state
from rayfin.actors.scheduler.sessions.seats import make_seats
from rayfin.actors.scheduler.stats import take_snapshot, take_stats
from rayfin.actors.scheduler.step_pipeline import StepPipeline
from rayfin.actors.scheduler.step_results import StepResults
from rayfin.actors.scheduler.weight_updates import WeightUpdates
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


def check_request(source: EngineRequest, config: EngineConfig) -> None:
    """Checks a request by itself.

    Raises:
        InvalidRequest: its tokens do not fit, its timeout is not positive, or a part of it is not
            served.
    """
    longest = len(source.prompt) + source.stopping.max_tokens
    if not len(source.prompt) or longest > config.max_model_len:
        raise ContextLengthExceeded(
            f"the request takes up to {longest} tokens, of at most {config.max_model_len}",
            "prompt",
        )
    if source.samples and len(source.output) >= source.stopping.max_tokens:
        raise InvalidRequest("the request has all of its tokens already", "max_tokens")
    if source.timeout is not None and not source.timeout > 0:
        raise InvalidRequest(f"timeout must be over 0 s, got {source.timeout}", "timeout")
    for part in source.parts:
        part.check(config.parts)


def queue_prepared(lifecycle: Lifecycle, endings: Endings) -> None:
    """Moves requests into the queue that have what they waited for; ends those that fail."""
    for place, beside in enumerate(lifecycle.beside, start=1):
        for request, error in beside.leaving():
            if error is None:
                lifecycle.queue(request, place)
            else:
                endings.end(request, "error", error=error)


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
        self.updates: WeightUpdates
        self._draining = self._asleep = False
        state = make_state(config)
        preparations = Preparations(executor, clock, state.counters.preparation)
        tier = make_tier(config, state, executor, clock)
        seats = make_seats(config, state, tier, clock)
        preemption = make_preemption(config, state)
        self.lifecycle = Lifecycle(state, preemption, preparations, clock, tier, seats)
        self._clock = clock
        microbatcher = DecodeMicrobatcher(state.running, max(config.steps_in_flight - 1, 1))
        rest = config.batch_mode == "idle"
        budget = make_budget(config, state.waiting, rest=rest)
        steps = make_scheduler(config, self.lifecycle, microbatcher, budget)
        scheduler = BackgroundScheduler(
            self.lifecycle, steps, microbatcher, budget, rest=rest, clock=clock
        )
        parts = PartGate(state.running, config.parts)

        def depth() -> int:
            if self.updates.holds_steps:
                return 0
            return scheduler.depth(config.steps_in_flight)

        self._quarantine = Quarantine(self.lifecycle, scheduler, parts, depth, clock)
        self._multi_step = make_multi_step(state, microbatcher, config, lease_seconds)
        self._pipeline = StepPipeline(state, executor, clock)
        self._outbox = Outbox()
        self._endings = Endings(self.lifecycle, self._quarantine, self._outbox, clock)
        self._results = StepResults(
            self.lifecycle, self._endings, self._outbox, self._multi_step, clock
        )
        self.updates = WeightUpdates(
            *(self.lifecycle, self._pipeline, self._endings, self._outbox),
            *(self.replace_runners, clock, lambda: self._asleep),
        )
        self.lifecycle.admission.gates = [
            *(self.updates, self._quarantine, parts, scheduler),
            *own_gates(config.plugins, state.running, state.counters.plugin_seconds),
        ]
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
        still = self._asleep or self.updates.is_paused
        return bool(self.lifecycle.state.live or self._pipeline) and not still

    @property
    def has_steps(self) -> bool:
        """Returns whether some work waits in the queue or runs, and not beside it."""
        state, tier = self.lifecycle.state, self.lifecycle.tier
        held_up, admission = False, self.lifecycle.admission
        # Where nothing runs, pages on their way may be what the first in the queue waits for.
        if tier.is_busy and not len(state.running) and (first := state.waiting.peek()) is not None:
            held_up = admission.lacks_room(first) or admission.overtakes(first)
        seats = self.lifecycle.seats
        looks = seats is not None and seats.is_due
        ready = (looks or len(state.live) > self.lifecycle.num_beside) and not held_up
        held_up = self._asleep or self.updates.is_paused
        return (ready or bool(self._pipeline)) and not held_up

    def add(self, source: EngineRequest) -> None:
        """Puts a request into the queue.

        Raises:
            InvalidRequest: its tokens do not fit, its key is in use, its timeout is not positive,
                or its fork parent has another prompt.
            Overloaded: the queue is full.
            RequestHandedBack: the engine drains or sleeps.
            RequestQuarantined: its prompt has killed runners.
        """
        state, key = self.lifecycle.state, (source.client, source.key)
        try:
            if self.state != "serving":
                raise RequestHandedBack("this engine takes no more requests")
            if key in state.live:
                raise InvalidRequest(f"request key {source.key} is in use", "request_id")
            check_request(source, self.config)
            self.updates.check(source)
            self._quarantine.check(source)
            now, ended = self._clock(), sum(state.counters.finished.values())
            rate, limits = state.completion_rate, state.queue_limits
            rate.observe(now, ended)
            # With output, another engine had admitted it.
            if not (source.output or source.background or limits.spares(source)):
                retry_after = rate.seconds_until_half(limits.num_requests, now, ended)
                limits.check(len(source.prompt), retry_after)
            if source.beams is not None:
                source = as_it_runs(source, self.config)
            fork_parent = find_fork_parent(source, state.live)
        except RayfinError as error:
            state.counters.refused(error)
            raise
        if not self.has_work:
            self._last_progress = now
        chain = HashChain(self.config.page_size, source.prefix_keys)
        output = np.array(source.output, np.int32)
        request = Request(source, state.arrivals, now, chain, output, fork_parent=fork_parent)
        request.spans = source.spans
        if self.config.prefix_caching:
            chain.extend(request.tokens())
        state.arrivals += 1
        state.live[key] = request
        self.lifecycle.enqueue(request)
        self._quarantine.watch(request)
        self._endings.deadlines.watch(request)
        if (rule := source.stopping.repetition) is not None:
            state.repetitions.watch(request, rule)
        state.counters.prompt_tokens += len(source.prompt)

    def abort(self, client: str, key: int, reason: str = "abort") -> None:
        """Ends a request; its pages are free before the next step. Unknown keys are ignored.

        Args:
            reason: what it is counted under; "stop" if its client has found a stop string.
        """
        self._endings.abort(client, key, reason)

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
                self._endings.end(request, "abort")
        return [self._endings.logs.find(tenant, request_id) for request_id in request_ids]

    def carry_out(self, command: Command) -> None:
        """Carries out an operator's command.

        Raises:
            EngineUnavailable: the command failed.
        """
        match command:
            case Command.DRAIN:
                self.drain()
            case Command.ADMIT:
                self._draining = False
            case Command.RESET_CACHE:
                self.lifecycle.forget_prefixes()
                self.lifecycle.tier.forget()
            case Command.SLEEP:
                self.sleep()
            case Command.SLEEP_DEEP:
                self.sleep(deep=True)
            case Command.LOAD:
                self._pipeline.load()
            case Command.WAKE:
                self.wake()

    def drain(self) -> None:
        """Accepts no more requests; those in the foreground may finish.

        Background requests are handed back at once, for they would hold the drain up.
        """
        self._draining = True
        if (seats := self.lifecycle.seats) is not None:  # whose next turns come elsewhere
            seats.forget()
        moved = RequestHandedBack("this engine drains")
        for request in list(self.lifecycle.state.live.values()):
            if request.source.background:
                self._endings.end(request, "error", error=moved)

    def sleep(self, *, deep: bool = False) -> None:
        """Frees all pages and the runners' memory of them; all requests wait for ``wake``.

        Args:
            deep: frees the model too; it is loaded again before the engine wakes.

        Raises:
            EngineUnavailable: the runners died and were replaced; the engine is awake.
        """
        if self._asleep:
            if deep:
                self._pipeline.sleep(deep=True)
            return
        try:
            while self._pipeline:
                self._update_from_oldest()
            self._pipeline.sleep(deep=deep)
        except RunnerGroupFailed as failure:
            self.replace_runners(failure)
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
            self.replace_runners(failure)

    def replace_runners(self, failure: RunnerGroupFailed) -> None:
        """Replaces runners that died; requeues all that ran, to recompute it from its token log.

        Raises:
            RunnerGroupFailed: they failed ``MAX_RESTARTS_WITHOUT_PROGRESS`` times without a step.
        """
        blocked = self._quarantine.died(
            self._pipeline.requests(), caused_by_step=failure.caused_by_step
        )
        if blocked is not None:
            self._restarts_without_progress = 0
            self._endings.end(blocked, "error", error=self._quarantine.block(blocked))
            live = list(self.lifecycle.state.live.values())
            for request in self._quarantine.same_prompt(blocked, live):
                self._endings.end(request, "error", error=RequestQuarantined(SAME_PROMPT))
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

    def step(self) -> dict[str, TokenDeltas]:
        """Schedules and submits until the pipeline is full, then processes its oldest result.

        Returns:
            Output by client; empty if nothing was sampled and no request ended.
        """
        self.lifecycle.state.tables.expire_pins(self._clock())
        self._endings.expire()
        queue_prepared(self.lifecycle, self._endings)
        if self._asleep or self.updates.is_paused:
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
            self.replace_runners(failure)
        return self._drain_outbox()

    def fail_all(self, error: RayfinError) -> dict[str, TokenDeltas]:
        """Ends every request with ``error``; returns the output by client."""
        for request in list(self.lifecycle.state.live.values()):
            self._endings.end(request, "error", error=error)
        return self._drain_outbox()

    def stats(self) -> EngineStats:
        """A snapshot of the counters; cheap, and safe to take from another thread."""
        progress = max(self._last_progress, self.updates.resumed_at)  # a pause is no stall
        return take_stats(
            self.config,
            self.lifecycle,
            suspects=self._quarantine.num_suspects,
            epoch=self._pipeline.epoch,
            draining=self._draining or self.updates.leaving,
            asleep=self._asleep,
            paused=self.updates.is_paused,
            weight_serial=self.updates.version.serial,
            weights=(self.updates.version.label, self.updates.version.digest[:16]),
            seconds_since_progress=self._clock() - progress if self.has_work else 0.0,
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
        busy = self.has_work or self.updates.is_paused
        assert busy or held == 0, "idle, and pages are held"

    def _drain_outbox(self) -> dict[str, TokenDeltas]:
        steps = self.lifecycle.state.counters.steps
        return self.updates.label(self._outbox.drain(self._pipeline.epoch, steps))

    def _update_from_oldest(self) -> None:
        record, result = self._pipeline.wait()
        self._results.apply(record, result)
        self._last_step = record.info
        self._last_progress = self._clock()
        self._restarts_without_progress = 0
        self._quarantine.observe(record.info, result)
        # A step whose result does not fit stays in flight, so that its requests become suspects.
        self._pipeline.pop()
