"""The runner in this process, behind the executor's interface: no Ray, no second process."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rayfin.actors.config import EngineConfig
from rayfin.actors.errors import (
    AdapterUnavailable,
    EngineBusy,
    InvalidRequest,
    RayfinError,
    RequestFailed,
)
from rayfin.actors.messages import PageTransfer, SchedulerInfo, StepResult
from rayfin.actors.parts import Need
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.pages.transfers import PageTransfers
from rayfin.actors.weights.version import Vote, WeightVersion


@dataclass(slots=True)
class _Submitted:
    """A step that ends when its result is asked for."""

    run: Callable[[SchedulerInfo], StepResult]
    info: SchedulerInfo

    def result(self) -> StepResult:
        return self.run(self.info)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Needs that are ready; ``failure`` says why one is not."""

    failure: RayfinError | None

    def done(self) -> bool:
        return True

    def error(self) -> RayfinError | None:
        return self.failure


@dataclass(slots=True)
class _Transfer:
    """Pages that are moved once the steps before have run; the loop waits meanwhile."""

    pages: PageTransfers
    what: PageTransfer
    next_step: Callable[[], tuple[int, int]]
    moved: int | None = None  # of the first pages

    def done(self) -> bool:
        if self.moved is None and (self.what.write or self.next_step() > self.what.after):
            self.moved = self.pages.run(self.what)
        return self.moved is not None

    def count(self) -> int:
        return self.moved or 0


class InlineExecutor:
    """Runs each step when its result is asked for, in the order of submission.

    A GPU gets steps before: it computes one while the scheduler reads the one before. On a CPU
    scheduler and model take turns on the same cores.

    An exception of a step is the caller's: there is no process to restart.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self.epoch = 0
        self._runner = runner
        self._config = config
        self._waiting: deque[SchedulerInfo] = deque()  # submitted, and not queued on a device
        self._submitted = (0, -1)  # epoch and number of the last step
        self._pages = PageTransfers(0, self._next_step, runner.overwritten, runner.names)
        self._version = WeightVersion()
        self._loading = threading.Lock()
        self._start()

    def _next_step(self) -> tuple[int, int]:
        return self._runner.next_step

    def _start(self) -> None:
        self._runner.start(self._config, self.epoch)
        self._use_pages()

    def _use_pages(self) -> None:
        folder, runner = self._config.page_folder, self._runner
        mover = runner.mover if self._config.num_offloaded_pages else None
        if folder is not None or mover is not None:
            folder = None if folder is None else folder.of(self._version.digest)
            self._pages.use(runner.cache, self.epoch, folder, runner.states, mover)

    def transfer(self, what: PageTransfer) -> _Transfer:
        what = replace(what, after=max(self._submitted, (self.epoch, -1)))
        transfer = _Transfer(self._pages, what, self._next_step)
        transfer.done()
        return transfer

    def submit(self, info: SchedulerInfo) -> _Submitted:
        self._submitted = (info.epoch, info.step)
        self._waiting.append(info)
        self._begin()
        return _Submitted(self._run, info)

    def _run(self, info: SchedulerInfo) -> StepResult:
        result = self._runner.execute(info)
        if self._waiting and self._waiting[0] is info:
            self._waiting.popleft()
        self._begin()
        return result

    def _begin(self) -> None:
        """Queues the steps that wait, as far as the runner takes them."""
        while self._waiting and self._runner.begin(self._waiting[0]):
            self._waiting.popleft()

    def prepare(self, needs: Sequence[Need]) -> _Prepared:
        """Prepares what requests to come need, at once."""
        try:
            self._runner.prepare(needs, at_once=True)  # the loop waits
        except (InvalidRequest, RequestFailed, AdapterUnavailable, EngineBusy) as error:
            return _Prepared(error)
        return _Prepared(None)

    def restart(self) -> None:
        """Empties the runner."""
        self.epoch += 1
        self._waiting.clear()
        self._start()

    def vote(self, version: WeightVersion) -> Vote:
        """See ``ModelRunner.vote``."""
        self.load()
        return self._runner.vote(version)

    def turn(self, version: WeightVersion, *, in_place: bool) -> None:
        self.epoch += 1
        self._waiting.clear()
        self._version = version
        self._pages.use(None, self.epoch)
        if in_place:
            self._runner.turn(self.epoch, version)
            self._use_pages()
            return
        self._runner.reload(version)
        self._start()

    def sleep(self, *, deep: bool = False) -> None:
        self._pages.use(None, self.epoch)
        with self._loading:
            if deep:
                self._runner.drop()
            else:
                self._runner.sleep()

    def load(self) -> None:
        """Loads the model, by its version, if it is not there; any thread may call it."""
        with self._loading:
            if not self._runner.is_loaded:
                self._runner.reload(self._version)

    def wake(self) -> None:
        self.load()
        self.restart()
