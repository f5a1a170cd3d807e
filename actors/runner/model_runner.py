"""Executes one step at a time on a device: profile, allocate pages, compute, sample."""

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from rayfin.actors import failpoints
from rayfin.actors.buckets.folder import at_hand
from rayfin.actors.config import (
    BatchLimits,
    EngineArgs,
    EngineConfig,
    ModelFacts,
    resolve_model_len,
)
from rayfin.actors.errors import EngineUnavailable, Fenced, InvalidConfig
from rayfin.actors.messages import (
    Int32Array,
    SchedulerInfo,
    StepResult,
)
from rayfin.actors.parts import Need, front_tokens
from rayfin.actors.plugins import contained, plugins, set_up_plugins, timed
from rayfin.actors.runner.batch import (
    build_inputs,
)
from rayfin.actors.runner.execution.execution import StepExecution
from rayfin.actors.runner.execution.failed_rows import leave_broken_device
from rayfin.actors.runner.execution.forward import Forward
from rayfin.actors.runner.execution.graph_steps import GraphSteps, make_graphs
from rayfin.actors.runner.loading import BASE, LoadedModel, load
from rayfin.actors.runner.memory import available_bytes, bytes_taken, largest_step, share_bytes
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.observers import (
    PluginTimes,
    RankAgreement,
    RowFaults,
    StepObserver,
)
from rayfin.actors.runner.page_checksums import PageChecksums
from rayfin.actors.runner.page_moves import PageMover
from rayfin.actors.runner.page_names import PageNames
from rayfin.actors.runner.page_prefaulter import PagePrefaulter
from rayfin.actors.runner.parallel.pipeline import PipelineTokenChannel
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.own_processor import OwnProcessor
from rayfin.actors.runner.sampling.processor import ProcessorFactory
from rayfin.actors.runner.sampling.sampler import Sampler, StepOutput, StepSampler
from rayfin.actors.runner.speculation.interface import Proposer
from rayfin.actors.runner.speculation.make import make_speculator, with_speculation
from rayfin.actors.runner.speculation.speculator import Speculator
from rayfin.actors.runner.state_tensors import StateTensors
from rayfin.actors.weights.version import Vote, WeightVersion
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.sampling.select import select_sample

if TYPE_CHECKING:
    from rayfin.actors.runner.gpu.graphs import DecodeGraphs
    from rayfin.actors.runner.weights.refill import Refiller

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerPlugins:
    """Further parts of a `ModelRunner`; README.md says how to write one of each kind."""

    processors: tuple[ProcessorFactory, ...] = ()  # before the default ones
    observers: tuple[StepObserver, ...] = ()
    proposer: Callable[[], Proposer] | None = None  # made anew when the runner starts
    wrap_model: Callable[[StepModel], StepModel] | None = None  # without graphs

    @classmethod
    def named(cls, names: Sequence[str] | None) -> "RunnerPlugins":
        """Those of ``--plugin``.

        Raises:
            InvalidConfig: one cannot be loaded.
        """
        spent: Counter[str] = Counter()
        processors = plugins(names, "logits_processor")
        observers: list[StepObserver] = [
            contained(plugin, "observer", spent) for plugin in plugins(names, "observer")
        ]
        return cls(
            tuple(partial(OwnProcessor, plugin, spent) for plugin in processors),
            (*observers, PluginTimes(spent)) if names else (),
            next((timed(plugin, "proposer", spent) for plugin in plugins(names, "proposer")), None),
        )


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
        version: WeightVersion = BASE,
    ) -> None:
        self._args = args = at_hand(args)
        set_up_plugins(tuple(args.plugin or ()))
        self._plugins = plugins or RunnerPlugins.named(args.plugin)
        if self._plugins.proposer and place is not None and place.stages > 1:
            raise InvalidConfig("a pipeline cannot speculate", "pipeline_parallel_size")
        self._take(with_speculation(load(args, place, version), args, version))
        self._next = (-1, 0)  # epoch and step
        self._bound: tuple[EngineConfig, KVTensors] | None = None  # the pages of the last start
        self._observers: list[StepObserver] = []
        self.names = PageNames()
        self._graphs: DecodeGraphs | None = None
        self._execution: StepExecution | None = None  # of the last start

    def _take(self, loaded: LoadedModel) -> None:
        self._loaded, wrap = loaded, self._plugins.wrap_model
        self._model = wrap(loaded.model) if wrap else loaded.model
        grouped, size = loaded.peers is not None, self._args.page_size
        self._forward = Forward(self._model, size, loaded.device, grouped=grouped)

    @property
    def next_step(self) -> tuple[int, int]:
        """Epoch and number of the step that ``execute`` takes next; (-1, 0) before ``start``."""
        return self._next

    @property
    def args(self) -> EngineArgs:
        """The settings, with a folder of this node in place of a bucket."""
        return self._args

    @property
    def loaded(self) -> LoadedModel:
        """The model with what was decided of it."""
        return self._loaded

    @property
    def cache(self) -> KVTensors | None:
        """The pages of the last start; None before it, and asleep."""
        return None if self._bound is None else self._bound[1]

    @property
    def mover(self) -> PageMover:
        """Moves pages of the last start."""
        return self._mover

    @property
    def states(self) -> StateTensors | None:
        """The states beside the pages; None of a model that keeps none."""
        return self._loaded.states

    def overwritten(self, pages: Int32Array) -> None:
        """``pages`` [N] will hold what a file holds; see ``DiskPages``. Another thread calls it."""
        for observer in self._observers:
            observer.overwritten(pages)

    def profile(self) -> tuple[ModelFacts, BatchLimits]:
        """What the model and the device say; runs the largest step unless memory was given."""
        args, loaded, device = self._args, self._loaded, self._loaded.device
        model_len = resolve_model_len(args, loaded.max_position, front_tokens(loaded.part_facts))
        limits = loaded.limits(args, model_len)
        available, share = args.kv_cache_memory, 0
        if available is None:
            ranks = 1 if loaded.peers is None else loaded.peers.place.size
            available = available_bytes(
                lambda: self._run_largest_step(limits, model_len),
                device,
                args.memory_utilization,
                ranks,
            ) - self._bytes_of_graphs(limits, model_len)
            available -= loaded.bytes_of_requests(args, limits)
            share = share_bytes(device, args.memory_utilization, ranks)
        return loaded.facts(args, available, share), limits

    def start(self, config: EngineConfig, epoch: int) -> None:
        """Allocates the pages; steps of ``epoch`` may come.

        Pages of an earlier start with the same ``config`` stay, and so do the CUDA graphs, which
        hold their addresses. Ranks connect anew, and record anew.

        Raises:
            PeerLost: another rank of the group does not start.
        """
        loaded = self._loaded
        rows, pages = config.limits.max_decoding_batch, config.max_pages_per_request
        groups = loaded.groups
        self._slots = RequestSlots(rows, pages, 0 if groups is None else groups.windows.beside)
        self._sampler = self._make_sampler(rows)
        cache = self._allocate(config)
        if self._execution is None:  # else steps have run, and these would write over pages
            self._warm_up(config)
        if loaded.peers:
            self._drop_graphs()  # which hold the connections of the start before
            loaded.peers.connect(str(epoch))
        if self._execution is None or loaded.peers:
            self._graphs = self._make_graphs(self._slots, config.limits, pages)
        if self._graphs is not None:
            self._graphs.use(self._slots)
        speculator = self._make_speculator(config)  # times steps, as they will run
        self.names.start(self._slots.page_tables, self._args.page_size, config.steps_in_flight)
        self._observers = self._make_observers(cache)
        relay = None
        if loaded.peers:
            relay = PipelineTokenChannel(loaded.peers, self._slots, self._sampler, config)
        self._forward.start(self._slots, self._sampler, self._observers, relay)
        of_start = self._slots, self._sampler
        graphs = None
        if self._graphs is not None:
            grouped = loaded.peers is not None
            graphs = GraphSteps(self._graphs, self._sampler, loaded.device, grouped=grouped)
        self._execution = StepExecution(self._forward, *of_start, graphs, speculator)
        self._next = (epoch, 0)

    def vote(self, version: WeightVersion) -> Vote:
        """Compares a version of the weights with the model; another thread may ask.

        Raises:
            InvalidRequest: it does not fit.
        """
        return self._refiller.check(version)

    @cached_property
    def _refiller(self) -> "Refiller":
        # Here, for it imports transformers' modelling code.
        from rayfin.actors.runner.weights.refill import Refiller

        return Refiller(self._loaded, self._args)

    def turn(self, epoch: int, version: WeightVersion) -> None:
        """Computes by ``version`` from now on; steps of ``epoch`` may come.

        What is known of requests stays, and so do pages. One that raises takes no steps any more.

        Raises:
            RayfinError: the model cannot be refilled.
        """
        self._next = (-1, 0)
        self.names.turn()
        self._refiller.refill(version)
        self._next = (epoch, 0)

    def reload(self, version: WeightVersion) -> None:
        """Loads the model anew, from ``version``; ``start`` has to follow.

        Raises:
            InvalidConfig: it cannot be loaded.
        """
        self.drop()  # two models need not fit
        args = self._args
        self._take(with_speculation(load(args, None, version), args, version))

    def drop(self) -> None:
        """Frees the model and its pages; ``reload`` has to follow."""
        self._close_observers()
        self._next, self._graphs, self._bound, self._execution = (-1, 0), None, None, None
        for name in ("_loaded", "_model", "_forward", "_mover", "_sampler", "_slots", "_refiller"):
            vars(self).pop(name, None)
        gc.collect()

    @property
    def is_loaded(self) -> bool:
        """Whether there is a model."""
        return "_loaded" in vars(self)

    def prepare(self, needs: Sequence[Need], *, at_once: bool = False) -> None:
        """As `ModelPart.prepare`, of all parts. Other threads may call it beside steps.

        Raises:
            RayfinError: one cannot be used.
        """
        for part in self._loaded.parts:
            part.prepare(needs, at_once=at_once)

    def sleep(self) -> None:
        """Frees the pages' memory; no step may come before the next ``start``."""
        self._graphs = self._bound = self._execution = None
        host = self._loaded.host_pages(None, self._args.page_size)
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
        output, execution = StepOutput(info), self._execution
        assert execution is not None, "a runner that sleeps has no steps"
        if self._graphs is not None and self._graphs.queued:
            started = self._graphs.queued[0].begun
            execution.collect(info, output, self._graphs.collect())
            return self._leave(info, output, started)
        started = time.perf_counter()
        self._enter(info)
        info = execution.begin(info)
        execution.run(info, output)
        return self._leave(info, output, started)

    def _can_queue(self, info: SchedulerInfo, graphs: "DecodeGraphs") -> bool:
        """Whether the device has all that the step needs, or the scheduler sends it."""
        (epoch, step), sampler = self._next, self._sampler
        new = [request.handle for request in info.new_requests]
        return (
            (info.epoch, info.step) == (epoch, step + len(graphs.queued))
            and not graphs.is_full
            and not failpoints.ACTIVE
            and not (len(info.moves) or self._speculates)
            and not any(observer.in_turn for observer in self._observers)
            and isinstance(sampler, Sampler)
            and all(sampler.enters_free(request) for request in info.new_requests)
            and bool((sampler.is_free(info.ids) | np.isin(info.ids, new)).all())
            and not graphs.still_ends(new)
            and graphs.supports(info, None)
        )

    def _enter(self, info: SchedulerInfo) -> None:
        """Takes in what a step brings beside its rows."""
        if len(info.moves):
            leaving = self.names.moving(info.moves)
            self._mover.run(info.moves)
            self.names.moved(leaving)
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
        for source in (self._sampler, self._execution):
            if source is not None and (usage := source.take_usage()) is not None:
                result.usage.append(usage)
        result.seconds = time.perf_counter() - started
        return result

    @property
    def _speculates(self) -> bool:
        return self._execution is not None and self._execution.speculator is not None

    @property
    def _samples(self) -> bool:
        """Whether this rank has logits."""
        return self._loaded.peers is None or self._loaded.peers.place.is_last

    def _make_sampler(self, rows: int) -> StepSampler:
        """What makes results of a forward: tokens of logits, or vectors of hidden states."""
        loaded = self._loaded
        if (sampler := loaded.make_sampler(rows)) is not None:
            return sampler
        sample = select_sample(loaded.device, self._args.attention, loaded.kernels)
        of_parts = [make for part in loaded.parts for make in part.processors]
        processors = (*self._plugins.processors, *of_parts)
        return Sampler(self._slots, loaded.device, sample, processors)

    def _make_speculator(self, config: EngineConfig) -> Speculator | None:
        if not isinstance(self._sampler, Sampler):
            return None
        before = None if self._execution is None else self._execution.speculator
        return make_speculator(
            self._plugins.proposer,
            self._args,
            config,
            self._loaded,
            self._model.forward,
            self._slots,
            self._sampler,
            None if before is None else before.planner.cost,
        )

    def _make_observers(self, cache: KVTensors) -> list[StepObserver]:
        observers: list[StepObserver] = [RowFaults()]
        page_size = self._args.page_size
        if prefaulter := PagePrefaulter.over(cache, self._loaded.page_bytes(page_size)):
            observers.append(prefaulter)
        checked = self._loaded.checked(cache)
        if self._args.check_pages and checked.keys:
            observers.append(PageChecksums(checked, page_size, self._slots))
        if self._loaded.peers:
            observers.append(RankAgreement(self._loaded.peers))
        return [*observers, self.names, *self._loaded.observers, *self._plugins.observers]

    def _allocate(self, config: EngineConfig) -> KVTensors:
        """The pages of ``config``: those of the start before with their graphs, or new ones."""
        if self._bound is not None and self._bound[0] == config and not self._loaded.recurrent:
            self._close_observers()
            return self._bound[1]
        self._graphs = self._bound = self._execution = None
        self._bind(0)  # frees the old pages before it takes new ones
        cache = self._bind(config.num_pages)
        host = self._loaded.host_pages(config, self._args.page_size)
        states = self._loaded.allocate_states(config)
        self._mover = PageMover(cache, host, states)
        self._bound = (config, cache)
        return cache

    def _warm_up(self, config: EngineConfig) -> None:
        """Compiles on a GPU what a later step would wait for, longer than its watchdog does."""
        if self._loaded.device.type != "cuda":
            return
        from rayfin.actors.runner.gpu.warm_up import warm_up

        sampler = self._sampler if self._samples and isinstance(self._sampler, Sampler) else None
        max_tokens = min(config.max_model_len, config.limits.max_batch_tokens)
        sizes = (self._args.page_size, config.num_pages, max_tokens)
        warm_up(self._model, sampler, *sizes, self._loaded.device)

    def _make_graphs(
        self, slots: RequestSlots, limits: BatchLimits, pages: int
    ) -> "DecodeGraphs | None":
        if self._plugins.wrap_model:
            return None
        return make_graphs(self._loaded, self._args, slots, limits, pages)

    def _drop_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = None

    def _bytes_of_graphs(self, limits: BatchLimits, model_len: int) -> int:
        """Memory that recorded steps take beside the pages; records them once to measure it."""
        pages = -(-model_len // self._args.page_size)
        self._bind(1)  # the page that rows without a request look at
        self._loaded.bind_states(limits.max_decoding_batch, 0)
        slots = RequestSlots(limits.max_decoding_batch, pages)
        taken = bytes_taken(lambda: self._make_graphs(slots, limits, pages), self._loaded.device)
        self._bind(0)
        self._loaded.bind_states(0, 0)
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
        self.names.turn()
        return self._loaded.bind(num_pages, self._args.page_size)
