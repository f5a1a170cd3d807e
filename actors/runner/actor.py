"""The Ray shell of a ModelRunner."""

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import ray
from ray.exceptions import RayError

from rayfin.actors import failpoints
from rayfin.actors.config import BatchLimits, EngineArgs, EngineConfig, ModelFacts
from rayfin.actors.errors import (
    AdapterUnavailable,
    EngineBusy,
    InvalidRequest,
    RayfinError,
    RequestFailed,
)
from rayfin.actors.messages import PageTransfer, SchedulerInfo, StepResult
from rayfin.actors.parts import Need
from rayfin.actors.processes.environment import at_low_priority
from rayfin.actors.processes.host_memory import resident_bytes
from rayfin.actors.processes.identity import Process, this_process
from rayfin.actors.processes.lifeline import Lifeline
from rayfin.actors.processes.logs import set_up
from rayfin.actors.processes.registry import find_actor, runner_name
from rayfin.actors.runner.parallel.rank import Address, ParallelRank, group_size
from rayfin.actors.runner.spare import (
    RunnerState,
    SparePlan,
    import_modules,
    maps_weights,
    plan_spares,
)
from rayfin.actors.runner.step_turns import StepResultCache, StepTurns
from rayfin.actors.settings.spare_runners import seats
from rayfin.actors.timing import (
    PAGE_READ_SECONDS,
    RUNNER_LEASE_SECONDS,
    STEP_OVERTAKEN_SECONDS,
)
from rayfin.actors.transport.steps import StepSocket
from rayfin.actors.weights.version import Vote, WeightVersion
from rayfin.cache.prefix_index import PageName

logger = logging.getLogger(__name__)


GENERATION_BITS = 20
"""epoch = generation << GENERATION_BITS | restarts: each scheduler counts its own restarts."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a scheduler must know of the runner that it takes over."""

    config: EngineConfig
    epoch: int
    version: WeightVersion  # of its weights
    names: dict[int, PageName] = field(default_factory=dict, compare=False)  # of its pages


OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {
        **{"prepare": 1, "steps": 2, "reads": 4, "writes": 1, "pages": 1, "weights": 1}
    },
}


@ray.remote(**OPTIONS)
class ModelRunnerActor:
    """One process with one device: one rank of its engine's group, or a spare of it.

    Calls run one at a time, in the order in which they are sent, but those of the group "prepare",
    one of which runs beside the others, ``execute_ahead``, of which two do, and a socket's steps.

    Ray retries nothing here: a step that may or may not have run is sent again by its group, and
    answered from memory if it has (result_cache.py).
    """

    def __init__(self, lease: float = RUNNER_LEASE_SECONDS) -> None:
        self._args: EngineArgs | None = None
        self._config: EngineConfig | None = None
        self._results = StepResultCache()
        self._turns = StepTurns(self._results, STEP_OVERTAKEN_SECONDS)
        self._speaks = True  # for its group
        self._rank = 0
        self._store: Any = None
        self._runner: Any = None  # a ModelRunner, whose module imports torch
        self._pages: Any = None  # a PageTransfers
        self._naming: Any = None  # a PageNaming, where other engines may ask
        self._server: Any = None  # a PageServer, once another engine has asked for it
        self._version = WeightVersion()
        self._loading = threading.Lock()
        self._steps: StepSocket | None = None
        self._started_bytes = 0  # of this process, when its pages were allocated first
        self._lifeline = Lifeline(lease, _exit)
        self._lifeline.watch()

    def process(self) -> Process:
        """Who this is, for those who must see it gone."""
        return this_process(ray.get_runtime_context().get_node_id())

    def open_store(self) -> Address:
        """Where the ranks of a new group will find each other; of rank 0, before any loads."""
        with self._lifeline.work():
            from rayfin.actors.runner.parallel.groups import open_store

            self._store = open_store()
            return _host(), self._store.port

    def load(
        self,
        args: EngineArgs,
        rank: int = 0,
        store: Address | None = None,
        measure: bool = True,
        version: WeightVersion | None = None,
    ) -> tuple[ModelFacts, BatchLimits] | None:
        """Loads the weights, or a rank's share of them, unless a spare runner has done so.

        Args:
            measure: whether to measure the memory left for pages, by a step. None otherwise.
            store: of rank 0, where there are several; then all ranks load at once.
            version: of the weights; None: the model's own.

        Raises:
            InvalidConfig, UnsupportedModel: the model cannot be served.
        """
        set_up(args.log_format, args.log_level)
        with self._lifeline.work():  # to import torch may take longer than the lease
            if failpoints.ACTIVE:
                failpoints.ACTIVE.hit("runner.load")
            place = None
            if store is not None:
                sizes = (args.tensor_parallel_size, args.pipeline_parallel_size)
                place = ParallelRank(rank, *sizes, store, _host())
                self._speaks, self._rank = place.answers, rank
            version = version or WeightVersion()
            self._load(args, place, version)
            if self._version != version:  # a spare has loaded the model's own
                self._runner.reload(version)
                self._version = version
            if not measure:
                return None
            profile: tuple[ModelFacts, BatchLimits] = self._runner.profile()
            return profile

    def _load(
        self,
        args: EngineArgs,
        place: ParallelRank | None = None,
        version: WeightVersion | None = None,
    ) -> None:
        # Here, where the device is: the scheduler's process sees this class, and no torch.
        with self._loading:
            if self._runner is None:
                from rayfin.actors.runner.model_runner import ModelRunner

                self._args, self._version = args, version or self._version
                self._runner = ModelRunner(args, place, version=self._version)
                if args.kv_peers:
                    from rayfin.actors.runner.page_namespace import PageNaming

                    self._naming = PageNaming(self._runner.args)

    @ray.method(concurrency_group="prepare")
    def plan_spares(self, served: bool) -> SparePlan:
        """What spares there may be beside this runner, and what they import."""
        if self._args is None or self._config is None:
            return SparePlan(0)
        grown = resident_bytes() - self._started_bytes
        return plan_spares(self._args, self._config, grown, served=served)

    @ray.method(concurrency_group="prepare")
    def warm(self, args: EngineArgs, modules: Sequence[str]) -> None:
        """Makes this a spare runner, whose ``load`` is short; it may take over before this ends."""
        set_up(args.log_format, args.log_level)
        with self._lifeline.work():
            import_modules(modules)
            if maps_weights(args):
                self._load(args)

    def start(self, config: EngineConfig, epoch: int) -> None:
        """Allocates the pages."""
        with self._lifeline.work(), self._turns.alone():
            if self._pages is not None:
                self._pages.use(None, epoch)  # a transfer of another scheduler ends
            self._runner.start(config, epoch)
            self._use_pages(config, epoch)
            if self._config is None:
                self._started_bytes = resident_bytes()
            self._config = config

    def _use_pages(self, config: EngineConfig, epoch: int) -> None:
        folder = config.page_folder
        offloads = config.num_offloaded_pages > 0
        if self._pages is None and (folder or config.kv_peers or offloads):
            from rayfin.actors.runner.pages.peers import Peers
            from rayfin.actors.runner.pages.transfers import PageTransfers

            runner = self._runner
            peers = Peers(self._ask_for_pages, self._greet) if config.kv_peers else None
            self._pages = PageTransfers(
                *(self._rank, lambda: runner.next_step, runner.overwritten, runner.names, peers)
            )
        if self._pages is not None:
            folder = None if folder is None else folder.of(self._version.digest)
            mover = self._runner.mover if offloads else None
            self._pages.use(self._runner.cache, epoch, folder, self._runner.states, mover)

    def _greet(self) -> bytes:
        """A digest of all that decides the bits of a page, also by where its rank stands."""
        assert self._args is not None
        loaded = self._runner.loaded
        size = loaded.page_bytes(self._args.page_size)
        depends = (self._naming.name(loaded), self._version.digest, self._rank, size)
        return sha256(repr(depends).encode()).digest()

    def _ask_for_pages(self, engine: str) -> str:
        """Returns the address of this rank's pages at another engine; empty if there is none."""
        assert self._args is not None
        alone = group_size(self._args) == 1
        for seat in range(seats(self._args)) if alone else [self._rank]:
            if (runner := find_actor(runner_name(engine, seat))) is not None:
                try:
                    asked = runner.page_address.remote(_host())
                    address: str = ray.get(asked, timeout=PAGE_READ_SECONDS)
                except RayError as error:
                    logger.debug("%s does not say where its pages are: %s", engine, error)
                    continue
                if address:
                    return address
        return ""

    @ray.method(concurrency_group="pages")
    def page_address(self, reader: str) -> str:
        """Where another engine's runner reads pages, once; empty: nowhere.

        Args:
            reader: its machine.

        Raises:
            OSError: it is another one, and the port is taken.
        """
        if self._args is None or self._config is None or not self._config.kv_peers:
            return ""
        if self._server is None:
            from rayfin.actors.runner.pages.peers import PageServer

            self._server = PageServer(self._runner.names, lambda: self._pages, self._greet)
        host, port = _host(), self._args.kv_port
        address: str = self._server.address(
            "" if reader == host else host, port and port + self._rank
        )
        return address

    @ray.method(concurrency_group="weights")
    def vote(self, version: WeightVersion) -> Vote | RayfinError:
        """Compares a version with the model, beside the steps; returns why it does not fit."""
        with self._lifeline.work():
            if failpoints.ACTIVE:
                failpoints.ACTIVE.hit("weights.vote")
            try:
                vote: Vote = at_low_priority(lambda: self._runner.vote(version))
                return vote
            except RayfinError as error:
                return error

    def turn(self, version: WeightVersion, epoch: int) -> None:
        """Computes by ``version`` from now on, in steps of ``epoch``; see ``ModelRunner.turn``."""
        with self._lifeline.work(), self._turns.alone():
            self._refill(version, epoch)
            if self._config is not None and self._runner.cache is not None:
                self._use_pages(self._config, epoch)

    def _refill(self, version: WeightVersion, epoch: int) -> None:
        if self._pages is not None:
            self._pages.use(None, epoch)
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit("weights.layer")
        self._runner.turn(epoch, version)
        self._version = version

    def sleep(self) -> None:
        """Gives the pages' memory back, until the next ``start``."""
        with self._turns.alone():
            if self._pages is not None:
                self._pages.use(None, self._runner.next_step[0])
            self._runner.sleep()

    def adopt(self, args: EngineArgs, identity: str, generation: int) -> Adoption | None:
        """Forgets all requests, and belongs to another scheduler from now on; the model stays, and
        so do pages.

        Steps of the one before are refused: the new epoch is of a later generation, at least
        ``generation``. None where there is nothing to adopt: other settings, another version of the
        code (``identity`` is the scheduler's), or no model yet.
        """
        if self._config is None or args != self._args or identity != args.identity:
            return None
        if self._runner.next_step[0] < 0:  # amid new weights
            return None
        generation = max(generation, (self._runner.next_step[0] >> GENERATION_BITS) + 1)
        self.start(self._config, generation << GENERATION_BITS)
        names = self._runner.names.all()
        return Adoption(self._config, self._runner.next_step[0], self._version, names)

    def execute(self, info: SchedulerInfo) -> StepResult | None:
        """Runs a step; its answer is an object ref in the scheduler's hands meanwhile.

        A step that has been run is not run again: its answer is given once more. None from all
        ranks of a group but the one that answers.

        Raises:
            StepMissing: the step before it has not come.
        """
        with self._lifeline.work():
            result = self._results.find(info, self._runner.next_step)
            if result is None:
                result = self._execute(info)
            return result if self._speaks else None

    @ray.method(concurrency_group="steps")
    def execute_ahead(self, info: SchedulerInfo) -> StepResult:
        """``execute``, of a step that may come while the one before is computed.

        Only of a runner that is alone in its group, and whose steps all come this way or by the
        socket of ``listen``.
        """
        return self._take(info)

    def listen(self) -> str:
        """Where a scheduler on this machine connects to send steps; empty if it cannot."""
        if self._steps is None:
            self._steps = StepSocket(self._take)
        return self._steps.address()

    def _take(self, info: SchedulerInfo) -> StepResult:
        with self._lifeline.work():
            return self._turns.run(self._runner, info, self._execute)

    def _execute(self, info: SchedulerInfo) -> StepResult:
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit_step("runner.before_execute", info)
        result: StepResult = self._runner.execute(info)
        self._results.keep(result)
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit_step("runner.before_reply", info)
        return result

    @ray.method(concurrency_group="reads")
    def read_pages(self, what: PageTransfer) -> int:
        """Reads pages from files or another engine; returns how many of the first are there."""
        return 0 if self._pages is None else int(self._pages.run(what))

    @ray.method(concurrency_group="writes")
    def write_pages(self, what: PageTransfer) -> int:
        """Writes pages to files; returns how many of the first ones are there."""
        return 0 if self._pages is None else int(self._pages.run(what))

    @ray.method(concurrency_group="prepare")
    def prepare(self, needs: list[Need]) -> RayfinError | None:
        """Prepares what requests to come need; returns why something cannot be used, or None.

        Without any needs it prepares what all of them take, such as the vocabulary of grammars.
        """
        try:
            self._runner.prepare(needs)
        except (InvalidRequest, RequestFailed, AdapterUnavailable, EngineBusy) as error:
            return error
        return None

    def ping(self) -> RunnerState:
        """Somebody wants this runner still; who it is."""
        self._lifeline.heard()
        return RunnerState(self.process(), serves=self._config is not None)

    def pid(self) -> int:
        return os.getpid()


def _host() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _exit() -> None:
    logger.warning("no scheduler wants this runner: it exits")
    os._exit(0)
