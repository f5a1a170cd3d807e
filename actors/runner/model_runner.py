"""Executes one step at a time on a device: profile, allocate pages, compute, sample."""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from rayfin.actors import failpoints
from rayfin.actors.config import (
    BatchLimits,
    EngineArgs,
    EngineConfig,
    ModelFacts,
    resolve_model_len,
)
from rayfin.actors.errors import EngineUnavailable, Fenced, InvalidConfig
from rayfin.actors.messages import (
    AdapterRef,
    BoolArray,
    Int32Array,
    Int64Array,
    SchedulerInfo,
    StepResult,
)
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.draft_planner import DraftPlanner
from rayfin.actors.runner.failed_rows import is_out_of_memory, isolate, leave_broken_device
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.observers import RankAgreement, RowFaults, StepObserver
from rayfin.actors.runner.parallel.pipeline import PipelineTokenChannel
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.runner.plugins import RunnerPlugins
from rayfin.actors.runner.pooling.pooler import Pooler
from rayfin.actors.runner.proposers.make import draft_seconds, make_proposer, with_drafter
from rayfin.actors.runner.sampling.grammars import GrammarBook, Vocabulary
from rayfin.actors.runner.sampling.processors.guidance import GuidanceProcessor
from rayfin.actors.runner.sampling.sampler import Sampled, Sampler, StepOutput, StepSampler
from rayfin.actors.runner.speculator import Speculator, grants_of, last_tokens
from rayfin.actors.runner.step.batch import (
    StepInputs,
    build_inputs,
    decoding_rows,
    next_step_info,
)
from rayfin.actors.runner.step.measured_step import measure_steps
from rayfin.actors.runner.step.memory import available_bytes, bytes_taken, largest_step
from rayfin.actors.runner.step.page_checksums import PageChecksums
from rayfin.actors.runner.step.page_moves import PageMover
from rayfin.actors.runner.step.page_prefaulter import PagePrefaulter
from rayfin.actors.runner.step.request_slots import RequestSlots
from rayfin.actors.step_cost import StepCost
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.sampling.select import select_sample

if TYPE_CHECKING:
    from rayfin.actors.runner.gpu.graphs import DecodeGraphs, MultiStepOutput

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps in a row without a row that could be computed: after more the runner is replaced."""


class ModelRunner:
    """One device's model, or its share of one, pages and requests. A plain class; the actor around
    it adds nothing. ``place`` is that of a rank among several, which get the same calls.

    Life: construct (weights), ``profile`` (facts for ``resolve``), ``start`` (pages), ``execute``;
    ``sleep`` and another ``start`` between two steps. ``begin`` may queue a step ahead of its
    ``execute``.
    """

    def __init__(
        self,
        args: EngineArgs,
        place: ParallelRank | None = None,
        plugins: RunnerPlugins | None = None,
    ) -> None:
        self._args = args
        self._plugins = plugins or RunnerPlugins()
        if self._plugins.proposer and place is not None and place.stages > 1:
            raise InvalidConfig("a pipeline cannot speculate", "pipeline_parallel_size")
        self._loaded = with_drafter(load(args, place, self._plugins.fetch_adapter), args)
        wrap = self._plugins.wrap_model
        self._model = wrap(self._loaded.model) if wrap else self._loaded.model
        self._next = (-1, 0)  # epoch and step
        self._bound: tuple[EngineConfig, KVTensors] | None = None  # the pages of the last start
        self._failed_steps = 0  # in a row, without a row that could be computed
        self._observers: list[StepObserver] = []
        self._graphs: DecodeGraphs | None = None
        self._relay: PipelineTokenChannel | None = None  # in a group
        self._speculator: Speculator | None = None  # with a proposer
        size = self._loaded.config.get_text_config(decoder=True).vocab_size
        self._book = GrammarBook(lambda: Vocabulary.load(args, size))

    @property
    def next_step(self) -> tuple[int, int]:
        """Epoch and number of the step that ``execute`` takes next; (-1, 0) before ``start``."""
        return self._next

    @property
    def cache(self) -> KVTensors | None:
        """The pages of the last start; None before it, and asleep."""
        return None if self._bound is None else self._bound[1]

    def overwritten(self, pages: Int32Array) -> None:
        """``pages`` [N] hold what a file held; see ``DiskPages``. Another thread calls it."""
        for observer in self._observers:
            observer.overwritten(pages)

    def profile(self) -> tuple[ModelFacts, BatchLimits]:
        """What the model and the device say; runs the largest step unless memory was given."""
        args, loaded, device = self._args, self._loaded, self._loaded.device
        model_len = resolve_model_len(args, loaded.max_position, loaded.clip_tokens)
        limits = loaded.limits(args, model_len)
        available = args.kv_cache_memory
        if available is None:
            available = available_bytes(
                lambda: self._run_largest_step(limits, model_len),
                device,
                args.memory_utilization,
                1 if loaded.peers is None else loaded.peers.place.size,
            ) - self._bytes_of_graphs(limits, model_len)
            available -= loaded.bytes_of_requests(args, limits)
        return loaded.facts(args, available), limits

    def start(self, config: EngineConfig, epoch: int) -> None:
        """Allocates the pages; steps of ``epoch`` may come.

        Pages of an earlier start with the same ``config`` stay, and so do the CUDA graphs, which
        hold their addresses.

        Raises:
            PeerLost: another rank of the group does not start.
        """
        loaded = self._loaded
        rows, pages = config.limits.max_decoding_batch, config.max_pages_per_request
        self._slots = RequestSlots(rows, pages)
        self._sampler = self._make_sampler(rows)
        cache = self._allocate(config)
        if self._graphs is None:
            self._warm_up(config)
            self._graphs = self._decode_graphs(self._slots, config.limits, pages)
        if self._graphs is not None:
            self._graphs.use(self._slots)
        self._speculator = self._make_speculator(config)  # times steps, as they will run
        self._observers = self._make_observers(cache)
        if loaded.peers:
            loaded.peers.connect(str(epoch))
            self._relay = PipelineTokenChannel(loaded.peers, self._slots, self._sampler, config)
        self._next = (epoch, 0)

    def prepare(
        self, grammars: Sequence[str], adapters: Sequence[AdapterRef] = (), at_once: bool = False
    ) -> None:
        """As `GrammarBook.prepare`; reads adapters too. Other threads may call it beside steps.

        Raises:
            GrammarFailed, InvalidRequest, AdapterUnavailable: one cannot be used.
        """
        if self._loaded.adapters is not None:
            self._loaded.adapters.prepare(adapters)
        if self._samples and (grammars or not adapters):
            self._book.prepare(grammars, at_once)

    def sleep(self) -> None:
        """Frees the pages' memory; no step may come before the next ``start``."""
        self._graphs = self._bound = self._speculator = None
        host = self._loaded.host_pages(0, self._args.page_size)
        self._mover = PageMover(self._bind(0), host, self._loaded.bind_states(0, 0))
        if self._loaded.device.type == "cuda":
            torch.cuda.empty_cache()

    def begin(self, info: SchedulerInfo) -> bool:
        """Queues a step on the device, behind the one that computes, if the host has no part in it.

        Its ``execute`` then only waits for the device and reads its tokens. A step that needs the
        tokens of the one before on the host is left to ``execute``, as is one out of turn.

        Returns:
            Whether it is queued.
        """
        graphs = self._graphs
        if graphs is None or not self._can_queue(info, graphs):
            return False
        self._enter(info)
        try:
            graphs.begin(info, None)
        except RuntimeError as error:
            leave_broken_device(self._loaded.device, error)
            raise
        return True

    def wait(self) -> None:
        """Waits for the device to end the oldest queued step; another thread may ``begin`` one."""
        queued = self._graphs.queued if self._graphs is not None else ()
        if queued:
            queued[0].tokens.wait()

    def execute(self, info: SchedulerInfo) -> StepResult:
        """Runs one step: moves pages, applies its diff, computes, samples.

        Raises:
            Fenced: the step is of an epoch that is over.
            EngineUnavailable: it is of another epoch, or not the next one.
            PageCorrupted: with ``check_pages``, before a request reads such a page.
        """
        epoch, step = self._next
        if info.epoch < epoch:
            raise Fenced(f"step {info.epoch}.{info.step} refused: this runner is at {epoch}")
        if (info.epoch, info.step) != (epoch, step):
            raise EngineUnavailable(
                f"step {info.epoch}.{info.step} refused: this runner is at {epoch}.{step}"
            )
        output = StepOutput(info)
        if self._graphs is not None and self._graphs.queued:
            started = self._graphs.queued[0].begun
            self._decode(info, np.arange(len(info.ids)), output, self._graphs.collect())
            return self._leave(info, output, started)
        started = time.perf_counter()
        self._enter(info)
        if self._speculator:
            info = self._speculator.begin(info)
        self._run_rows(info, output)
        return self._leave(info, output, started)

    def _can_queue(self, info: SchedulerInfo, graphs: "DecodeGraphs") -> bool:
        """Whether the device has all that the step needs, or the scheduler sends it."""
        epoch, step = self._next
        return (
            (info.epoch, info.step) == (epoch, step + len(graphs.queued))
            and not graphs.is_full
            and not failpoints.ACTIVE
            and not (len(info.moves) or info.new_requests or self._speculator)
            and not any(observer.in_turn for observer in self._observers)
            and isinstance(self._sampler, Sampler)
            and bool(self._sampler.is_plain(info.ids).all())
            and graphs.supports(info, None)
        )

    def _enter(self, info: SchedulerInfo) -> None:
        """Takes in what a step brings beside its rows."""
        if len(info.moves):
            self._mover.run(info.moves)
        self._slots.apply(info)
        for observer in self._observers:
            observer.before(info)
        self._sampler.apply_diff(info)

    def _leave(self, info: SchedulerInfo, output: StepOutput, started: float) -> StepResult:
        """The result of a step that has run."""
        result = output.finish()
        for observer in self._observers:
            observer.after(info, result)
        self._next = (info.epoch, info.step + 1)
        result.grammars = self._sampler.take_usage()
        result.drafts = self._speculator.take_usage() if self._speculator else None
        result.seconds = time.perf_counter() - started
        return result

    @property
    def _samples(self) -> bool:
        """Whether this rank has logits."""
        return self._loaded.peers is None or self._loaded.peers.place.is_last

    def _make_sampler(self, rows: int) -> StepSampler:
        """What makes results of a forward: tokens of logits, or vectors of hidden states."""
        loaded = self._loaded
        if loaded.pools is not None:
            return Pooler(loaded.pools.recipe, loaded.pools.head, rows)
        sample = select_sample(loaded.device, self._args.attention, loaded.kernels)
        processors = self._plugins.processors
        return Sampler(self._slots, loaded.device, sample, processors, self._make_masker())

    def _make_masker(self) -> GuidanceProcessor | None:
        if not self._samples:
            return None
        return GuidanceProcessor(self._loaded.device, self._book, limited=not self._loaded.peers)

    def _make_speculator(self, config: EngineConfig) -> Speculator | None:
        proposer, settings = self._plugins.proposer, config.speculation
        if (proposer is None and settings is None) or not isinstance(self._sampler, Sampler):
            return None
        loaded, named = self._loaded, self._args.sets_speculation
        device = loaded.device
        made = proposer() if proposer else make_proposer(config, loaded.model, self._slots, device)
        adaptive = settings is not None and settings.adaptive and (named or proposer is None)
        follow = loaded.peers is None  # ranks would measure different times
        cost = StepCost.assumed()
        if adaptive and follow:
            states = loaded.states
            cost = measure_steps(self._model.forward, config, device, states, few=not named)
        planner = DraftPlanner(
            config.limits.max_decoding_batch,
            config.num_speculative_tokens,
            cost,
            adaptive=adaptive,
            follow=follow,
            draft_seconds=draft_seconds(made),
        )
        place = (device, config.limits)
        return Speculator(made, self._slots, self._sampler, *place, planner, loaded.states)

    def _make_observers(self, cache: KVTensors) -> list[StepObserver]:
        observers: list[StepObserver] = [RowFaults()]
        page_size = self._args.page_size
        if prefaulter := PagePrefaulter.over(cache, self._loaded.page_bytes(page_size)):
            observers.append(prefaulter)
        own = self._loaded.checked(cache)
        if self._args.check_pages and own.keys:
            observers.append(PageChecksums(own, page_size, self._slots))
        if self._loaded.peers:
            observers.append(RankAgreement(self._loaded.peers))
        return [*observers, *self._loaded.observers, *self._plugins.observers]

    def _run_rows(self, info: SchedulerInfo, output: "StepOutput") -> None:
        """All rows of a step; those that leave the CUDA graphs run while a graph runs the others.

        With a speculator one part runs after the other.
        """
        rows = np.arange(len(info.ids))
        host = self._rows_off_graphs(info)
        if self._graphs is None or not host.any() or host.all():
            self._run(info, rows, output)
            return
        others, part = rows[~host], decoding_rows(info, rows[~host])
        queued = self._speculator is None and self._queue(part)
        try:
            self._run(decoding_rows(info, rows[host]), rows[host], output)
        finally:
            replayed = self._collect() if queued else None
        if self._speculator:
            self._run(part, others, output)
        else:
            self._decode(part, others, output, replayed)

    def _rows_off_graphs(self, info: SchedulerInfo) -> BoolArray:
        """[R] which rows of a step no CUDA graph can run, though it may run the others."""
        if self._graphs is None or len(info.ids) != info.decoding_batch:
            return np.zeros(len(info.ids), np.bool_)
        return self._sampler.needs_host(info) | self._graphs.left_out(info.ids)

    def _run(self, info: SchedulerInfo, rows: Int64Array, output: "StepOutput") -> None:
        """All decode steps of ``info``, which has the ``rows`` [R] of the call."""
        if self._speculator:
            left = grants_of(info)
            drafted = self._speculator.expand(info, left)
            if drafted is not None or self._graphs is None:
                self._speculate(info, drafted, left, rows, output)
                return
        self._decode(info, rows, output, self._replay(info))

    def _decode(
        self,
        info: SchedulerInfo,
        rows: Int64Array,
        output: "StepOutput",
        replayed: "MultiStepOutput | None",
    ) -> None:
        """All decode steps of ``info`` without drafts, which graphs may have ``replayed``."""
        among = np.arange(len(rows))  # where the remaining rows stand among those of the replay
        for column in range(info.num_steps):
            if replayed is None:
                sampled = self._advance(info, output)
            else:
                sampled = self._sampler.replayed(
                    info, replayed.tokens[column, among], replayed.logprobs(column, among)
                )
            if self._speculator:
                self._speculator.remember(info, [sampled])
            else:
                self._slots.remember(info, sampled.tokens)
            output.add(rows, column, [sampled])
            if column + 1 == info.num_steps:
                break
            still_decoding = self._slots.still_decoding(info, sampled.tokens)
            rows, among = rows[still_decoding], among[still_decoding]
            info = next_step_info(info, still_decoding)
            if not len(rows):
                break

    def _speculate(
        self,
        info: SchedulerInfo,
        drafted: SchedulerInfo | None,
        left: Int64Array,
        rows: Int64Array,
        output: "StepOutput",
    ) -> None:
        """All decode steps of ``info``, the first one as ``drafted``, with drafts.

        Args:
            left: [R] tokens that each row may sample in this call.
        """
        speculator = self._speculator
        assert speculator is not None
        for number in range(info.num_steps):
            started, drafting = time.perf_counter(), speculator.drafting
            results = self._verify(drafted) if drafted is not None else None
            step = info if drafted is None or results is None else drafted
            results = results or [self._advance(info, output)]
            counts = speculator.remember(step, results)
            output.add(rows, number, results)
            if len(rows) == info.decoding_batch:
                tokens, seconds = len(step.merge_prompt), time.perf_counter() - started
                drafts = tokens - len(rows)
                speculator.planner.observe(
                    *(tokens, drafts, len(rows), int(counts.sum()), seconds, drafting)
                )
            if number + 1 == info.num_steps:
                return
            left = left - counts
            last = last_tokens(results, counts)
            goes_on = self._slots.still_decoding(info, last, counts) & (left > 0)
            rows, left = rows[goes_on], left[goes_on]
            info = next_step_info(info, goes_on, counts)
            if not len(rows):
                return
            drafted = speculator.expand(info, left)

    def _replay(self, info: SchedulerInfo) -> "MultiStepOutput | None":
        """The decode steps of the call as CUDA graphs, or None if they cannot run it."""
        return self._collect() if self._queue(info) else None

    def _queue(self, info: SchedulerInfo) -> bool:
        """Queues the decode steps of the call as CUDA graphs, unless they cannot run it."""
        if self._graphs is None or failpoints.ACTIVE or self._rows_off_graphs(info).any():
            return False
        rules = self._sampler.row_token_rules(info)
        if not self._graphs.supports(info, rules):
            return False
        try:
            self._graphs.begin(info, rules)
        except RuntimeError as error:  # step by step it shows which row is at fault
            leave_broken_device(self._loaded.device, error)
            logger.exception("a multi-step call failed as a CUDA graph: it runs step by step")
            return False
        return True

    def _collect(self) -> "MultiStepOutput | None":
        assert self._graphs is not None
        try:
            return self._graphs.collect()
        except RuntimeError as error:
            leave_broken_device(self._loaded.device, error)
            logger.exception("a multi-step call failed as a CUDA graph: it runs step by step")
            return None

    def _advance(self, info: SchedulerInfo, output: "StepOutput") -> Sampled:
        """One forward, and one token for each row that samples; a row at fault fails alone.

        Raises:
            Exception: the model's own, if a step of several rows fails as a whole, or steps of one
                row have failed again and again: the requests are not at fault.
        """
        try:
            return self._compute(info)
        except Exception as error:
            if self._loaded.peers:  # they are amid this step: no rank can repeat it alone
                raise
            leave_broken_device(self._loaded.device, error)
            output.result.out_of_memory |= is_out_of_memory(error)
            self._failed_steps += 1
            if self._failed_steps > MAX_FAILED_STEPS:
                raise
            sampled = isolate(self._compute, info, error)
            if len(sampled.errors) < len(info.ids):
                self._failed_steps = 0
            return sampled

    def _compute(self, info: SchedulerInfo) -> Sampled:
        if self._relay:
            self._relay.before(info)
        # To enter the mode takes a tenth of a millisecond, and a compiled decoder needs none.
        mode = nullcontext if isinstance(self._model, CpuDecoder) else torch.inference_mode
        with mode():
            inputs, at = build_inputs(info, self._slots, self._args.page_size, self._loaded.device)
            logits = self._forward(info, inputs, at.rows)
            return (self._relay or self._sampler).sample(info, at, logits)

    def _verify(self, info: SchedulerInfo) -> list[Sampled] | None:
        """What a step with drafts gives; None if it fails: without them it shows the bad row."""
        try:
            return self._compute_drafts(info)
        except Exception as error:
            if self._loaded.peers:
                raise
            leave_broken_device(self._loaded.device, error)
            logger.exception("a step with drafts failed: it runs without them")
            return None

    @torch.inference_mode()
    def _compute_drafts(self, info: SchedulerInfo) -> list[Sampled]:
        """One forward over the drafts; what is sampled as far as they are right."""
        assert self._speculator is not None
        inputs, _ = build_inputs(info, self._slots, self._args.page_size, self._loaded.device)
        columns = self._speculator.columns(info)
        inputs.sampled = torch.from_numpy(columns.index).to(inputs.sampled)
        logits = self._forward(info, inputs, columns.rows)
        return self._speculator.verify(info, columns, logits)

    def _forward(self, info: SchedulerInfo, inputs: StepInputs, rows: Int64Array) -> torch.Tensor:
        """Logits [S + P, V]: the rows [S] sample from the first ones, the others are scored."""
        self._sampler.add_scored(info, inputs)
        logits = self._model.forward(inputs)
        for observer in self._observers:
            observer.forwarded(info, rows, logits)
        return logits

    def _allocate(self, config: EngineConfig) -> KVTensors:
        """The pages of ``config``: those of the start before with their graphs, or new ones."""
        if self._bound is not None and self._bound[0] == config and not self._loaded.recurrent:
            self._close_observers()
            return self._bound[1]
        self._graphs = self._bound = self._speculator = None
        self._bind(0)  # frees the old pages before it takes new ones
        cache = self._bind(config.num_pages)
        host = self._loaded.host_pages(config.num_host_pages, self._args.page_size)
        kept = (config.limits.max_decoding_batch, config.num_snapshots, config.num_draft_states)
        states = self._loaded.bind_states(*kept)
        self._mover = PageMover(cache, host, states)
        self._bound = (config, cache)
        return cache

    def _warm_up(self, config: EngineConfig) -> None:
        """Compiles on a GPU what a later step would wait for, longer than its watchdog does."""
        if self._loaded.device.type != "cuda":
            return
        from rayfin.actors.runner.gpu.warm_up import warm_up

        sampler = self._sampler if self._samples and isinstance(self._sampler, Sampler) else None
        most = min(config.max_model_len, config.limits.max_batch_tokens)
        sizes = (self._args.page_size, config.num_pages, most)
        warm_up(self._model, sampler, *sizes, self._loaded.device)

    def _decode_graphs(
        self, slots: RequestSlots, limits: BatchLimits, pages_per_request: int
    ) -> "DecodeGraphs | None":
        gpu_model, drafts = self._loaded.gpu_model, self._loaded.drafts
        if gpu_model is None or self._args.enforce_eager or self._plugins.wrap_model:
            return None
        from rayfin.actors.runner.gpu.graphs import DecodeGraphs

        return DecodeGraphs(
            gpu_model,
            slots,
            rows=limits.max_decoding_batch,
            pages_per_request=pages_per_request,
            page_size=self._args.page_size,
            max_num_steps=self._args.max_lease,
            max_tokens=limits.max_batch_tokens,
            device=self._loaded.device,
            draft=None if drafts is None else drafts.gpu_model,
        )

    def _bytes_of_graphs(self, limits: BatchLimits, model_len: int) -> int:
        """Memory that recorded steps take beside the pages; records them once to measure it."""
        pages = -(-model_len // self._args.page_size)
        self._bind(1)  # the page that rows without a request look at
        slots = RequestSlots(limits.max_decoding_batch, pages)
        taken = bytes_taken(lambda: self._decode_graphs(slots, limits, pages), self._loaded.device)
        self._bind(0)
        return taken

    def _run_largest_step(self, limits: BatchLimits, model_len: int) -> int:
        """Runs the costliest step; returns the bytes of its pages, which are freed again."""
        page_size = self._args.page_size
        info, pages = largest_step(limits, page_size, model_len)
        rows = limits.max_decoding_batch
        slots = RequestSlots(rows, int(pages.max()))
        slots.apply(info)
        self._bind(len(info.new_pages))
        self._loaded.bind_states(len(info.ids), 0)
        inputs, _ = build_inputs(info, slots, page_size, self._loaded.device)
        inputs.sampled = inputs.sampled.repeat(rows)[:rows]
        logits = self._model.forward(inputs)
        logits.to(torch.float32, copy=True)  # as for requests whose logits are changed
        self._bind(0)
        self._loaded.bind_states(0, 0)
        states = 2 * len(info.ids) * self._loaded.state_bytes
        return len(info.new_pages) * self._loaded.page_bytes(page_size) + states

    def _close_observers(self) -> None:
        for observer in self._observers:
            observer.close()
        self._observers = []

    def _bind(self, num_pages: int) -> KVTensors:
        self._close_observers()
        return self._loaded.bind(num_pages, self._args.page_size)
