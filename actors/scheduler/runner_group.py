"""The runners of one engine, and the only file that knows how a step reaches them.

An only runner on the scheduler's machine gets its steps by a socket (transport/steps.py). Otherwise
the channel is plain Ray: a SchedulerInfo is the argument of an actor call, and the call's object
ref stands for the step until its StepResult is fetched. With two steps in flight the transport is
hidden behind the step before. Several ranks get one shared ref, and the first rank of the last
stage answers; for one rank a ``ray.put`` costs more than it saves (docs/design.md).

If one rank is lost, all are replaced under a new epoch. A spare runner takes over from a rank that
is alone, if there is one (faults/spare_runners.py).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    PlacementGroupSchedulingStrategy,
)

from rayfin.actors import failpoints
from rayfin.actors.config import EngineArgs, EngineConfig, resolve, scarcest
from rayfin.actors.errors import (
    CallLost,
    EngineUnavailable,
    Fenced,
    PeerLost,
    RayfinError,
    RunnerGroupFailed,
    StepMissing,
)
from rayfin.actors.messages import PageTransfer, SchedulerInfo, StepResult
from rayfin.actors.parts import Need
from rayfin.actors.processes.identity import Process
from rayfin.actors.processes.registry import (
    NAMESPACE,
    describe,
    end_process,
    find_actor,
    runner_name,
    when_name_is_free,
)
from rayfin.actors.runner.actor import GENERATION_BITS, Adoption, ModelRunnerActor
from rayfin.actors.runner.parallel.rank import group_size
from rayfin.actors.runner.spare import RunnerState, SparePlan
from rayfin.actors.scheduler.faults.spare_runners import SpareRunners
from rayfin.actors.scheduler.faults.watchdog import Watchdog
from rayfin.actors.settings.spare_runners import seats
from rayfin.actors.timing import (
    MODEL_LOAD_SECONDS,
    RUNNER_ADOPTION_SECONDS,
    RUNNER_PROCESS_SECONDS,
    SPARE_ANSWER_SECONDS,
    STEP_RESEND_PAUSE_SECONDS,
    STEP_RESEND_SECONDS,
    WAIT_SLICE_SECONDS,
)
from rayfin.actors.transport.steps import StepLink, open_link
from rayfin.actors.weights.version import Vote, WeightVersion
from rayfin.cache.prefix_index import PageName

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _RemoteStep:
    """A step that was sent to all ranks, of which one answers."""

    group: "RunnerGroup"
    # By rank, of a StepResult or of None, or the link that answers; None: a failpoint dropped it.
    refs: list[Any] | StepLink | None
    info: SchedulerInfo

    def result(self) -> StepResult:
        """Waits for the answer; sends the step again if its call was lost. See ``PendingStep``."""
        # A runner runs no step twice. Several ranks get no second call: those that received the
        # first may wait in the next step for the one that did not.
        group, patience = self.group, self.group.watchdog.patience(self.info)
        lost_since: float | None = None
        while True:
            try:
                answers = self._answers(patience)
                break
            except CallLost as lost:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > STEP_RESEND_SECONDS or self._several:
                    raise
                logger.warning("step %d is sent again: %s", self.info.step, lost)
                time.sleep(STEP_RESEND_PAUSE_SECONDS)
                self.refs = group.send(self.info)
        result: StepResult = next(answer for answer in answers if answer is not None)
        group.watchdog.observe(self.info, result.seconds, result.seconds_apart)
        if failpoints.ACTIVE and failpoints.ACTIVE.hit_step("group.reply", self.info) == "drop":
            group.wait(None, patience, "the step")
        return result

    @property
    def _several(self) -> bool:
        return isinstance(self.refs, list) and len(self.refs) > 1

    def _answers(self, patience: float) -> list[StepResult | None]:
        sent, info = self.refs, self.info
        if isinstance(sent, StepLink):
            return self.group.hear(lambda slice: [sent.answer(info, slice)], patience, "the step")
        return self.group.wait(sent, patience, "the step")


class _RemotePrepare:
    """Needs that were sent to all ranks; see ``PendingPrepare``.

    A rank that has died or raised says nothing of them: a step will show what is wrong.
    """

    def __init__(self, refs: list[Any], on_done: Callable[[], None]) -> None:
        self._answers: list[Future[RayfinError | None]] = [ref.future() for ref in refs]
        for answer in self._answers:
            answer.add_done_callback(lambda _: on_done())

    def done(self) -> bool:
        return all(answer.done() for answer in self._answers)

    def error(self) -> RayfinError | None:
        for answer in self._answers:
            if (failure := answer.exception()) is not None:
                logger.warning("nothing is prepared ahead: %s", failure)
            elif (error := answer.result()) is not None:
                return error
        return None


class _RemoteTransfer:
    """Pages that all ranks move; see ``PendingTransfer``."""

    def __init__(self, refs: list[Any], on_done: Callable[[], None]) -> None:
        self._answers: list[Future[int]] = [ref.future() for ref in refs]
        for answer in self._answers:
            answer.add_done_callback(lambda _: on_done())

    def done(self) -> bool:
        return all(answer.done() for answer in self._answers)

    def count(self) -> int:
        if any(answer.exception() is not None for answer in self._answers):
            return 0
        return min((answer.result() for answer in self._answers), default=0)


class _SpareActors:
    """The spares of a group as actors; see ``SpareCalls``."""

    def __init__(
        self,
        args: EngineArgs,
        runners: Callable[[], list[Any]],
        create: Callable[[str], Any | None],
        *,
        served: bool,
    ) -> None:
        self._args = args
        self._runners = runners
        self._served = served
        self._create = create

    def plan(self) -> Future[SparePlan] | None:
        runners = self._runners()
        return _answer(runners[0].plan_spares.remote(self._served)) if runners else None

    def make(self, name: str) -> Any | None:
        return self._create(name)

    def warm(self, runner: Any, plan: SparePlan) -> Future[None]:
        return _answer(runner.warm.remote(self._args, plan.modules))

    def ping(self, runner: Any) -> Future[RunnerState]:
        return _answer(runner.ping.remote())

    def end(self, runner: Any, process: Process | None) -> None:
        if process is not None:
            end_process(process)
        ray.kill(runner)


class RunnerGroup:
    """Starts or adopts the runners of the engine ``name``, sends them steps, replaces them.

    Args:
        generation: of this scheduler; steps of a later generation fence off those of an earlier.
        known: the runners' processes, if known; a hung runner cannot report its own.
        detached: the runners outlive this process by ``RUNNER_LEASE_SECONDS`` without a step or a
            ping. Otherwise they die with it.
        on_wait: called at least once a second while this waits for runners.
        may_restart: called before runners are replaced; False for a scheduler that was replaced.
        on_prepared: called from another thread whenever a rank has prepared something.
    """

    def __init__(
        self,
        args: EngineArgs,
        name: str,
        placement: PlacementGroup | None = None,
        *,
        generation: int = 0,
        known: Sequence[Process] = (),
        detached: bool = False,
        on_wait: Callable[[], None] = lambda: None,
        may_restart: Callable[[], bool] = lambda: True,
        on_prepared: Callable[[], None] = lambda: None,
    ) -> None:
        self.epoch = generation << GENERATION_BITS
        self.watchdog = Watchdog()
        self._args = args
        names = [runner_name(name, seat) for seat in range(seats(args))]
        ranks = group_size(args)
        self._names = names[:ranks]  # by rank
        self._placement = placement
        self._detached = detached
        self._on_wait = on_wait
        self._may_restart = may_restart
        self._on_prepared = on_prepared
        self._runners: list[Any] = []  # by rank
        self._processes = list(known)
        # In its engine's bundle a spare needs no room: it computes only when the runner has died.
        calls = _SpareActors(args, lambda: self._runners, self._create_spare, served=detached)
        has_spares = ranks == 1 and placement is not None
        self.spares = SpareRunners(names if has_spares else names[:1], calls)
        self._config: EngineConfig | None = None
        self.names: dict[int, PageName] = {}  # what the pages of adopted runners hold
        self.version = WeightVersion()  # what runners compute by, and those that replace them
        self._submitted = (self.epoch, -1)  # epoch and number of the last step
        self._link: StepLink | None = None
        self.waits = False  # in ``hear``

    @property
    def generation(self) -> int:
        return self.epoch >> GENERATION_BITS

    def start(self) -> EngineConfig:
        """Adopts live runners, or starts new ones; returns when steps can be sent.

        New runners load the model and allocate its pages.

        Raises:
            InvalidConfig, UnsupportedModel: the model cannot be served.
            RunnerGroupFailed: a runner died meanwhile.
        """
        if (adopted := self._adopt()) is not None:
            self._config, self.epoch = adopted.config, adopted.epoch
            if adopted.version != self.version:
                self.names = {}
                try:
                    self._turn()
                except RunnerGroupFailed as failure:  # it may take none where it is
                    logger.warning("%s is replaced: %s", ", ".join(self._names), failure)
                    self.stop()
                    return self._start_new(MODEL_LOAD_SECONDS)
            self._open_link()
            logger.warning("adopted %s at epoch %d", ", ".join(self._names), self.epoch)
            return self._config
        return self._start_new(MODEL_LOAD_SECONDS)

    def transfer(self, what: PageTransfer) -> _RemoteTransfer:
        """See ``Executor.transfer``."""
        method = "write_pages" if what.write else "read_pages"
        sent = self._on_all(method, replace(what, after=max(self._submitted, (self.epoch, -1))))
        return _RemoteTransfer(sent, self._on_prepared)

    def submit(self, info: SchedulerInfo) -> _RemoteStep:
        """Sends a step without waiting. Steps run in order of submission."""
        self._submitted = (info.epoch, info.step)
        if failpoints.ACTIVE:
            return self._submit_planted(info)
        return _RemoteStep(self, self.send(info), info)

    def send(self, info: SchedulerInfo) -> list[Any] | StepLink:
        """Sends each runner the step; returns refs of its answers by rank, or the link."""
        if len(self._runners) > 1:
            return self._on_all("execute", ray.put(info))
        if (link := self._link) is not None and link.takes(info):
            link.send(info)
            return link
        # Beside a link two threads of the runner take steps, as beside a GPU.
        ahead = link is not None or self._args.device == "cuda"
        return self._on_all("execute_ahead" if ahead else "execute", info)

    def prepare(self, needs: Sequence[Need]) -> _RemotePrepare:
        """See ``Executor.prepare``."""
        sent = self._on_all("prepare", list(needs))
        return _RemotePrepare(sent, self._on_prepared)

    def restart(self) -> None:
        """Kills the runners and starts new ones under a new epoch; the page count stays.

        Raises:
            RunnerGroupFailed: the old ones cannot be killed, or the new ones not be started.
            Fenced: this scheduler has been replaced.
        """
        if not self._may_restart():
            raise Fenced("another scheduler has taken over")
        logger.warning("restarting the runners of epoch %d", self.epoch)
        self.stop()
        self._pause(self.watchdog.backoff())
        self.epoch += 1
        self._start_new(RUNNER_PROCESS_SECONDS)

    def vote(self, version: WeightVersion) -> Vote:
        """Asks all ranks whether they can serve a version; any thread may ask.

        Raises:
            RayfinError: one cannot, or has died.
        """
        try:
            votes = ray.get(self._on_all("vote", version), timeout=MODEL_LOAD_SECONDS)
        except (RayError, TimeoutError) as error:  # Ray's is both
            raise EngineUnavailable(f"a runner does not vote: {error!r}") from error
        for vote in votes:
            if isinstance(vote, RayfinError):
                raise vote
        return Vote(all(vote.in_place for vote in votes), votes[0].kept)

    def turn(self, version: WeightVersion, *, in_place: bool) -> None:
        """See ``Executor.turn``."""
        self.version = version
        if in_place:
            self._turn()
        else:
            self.restart()

    def _turn(self) -> None:
        self.epoch += 1
        turned = self._on_all("turn", self.version, self.epoch)
        self.wait(turned, MODEL_LOAD_SECONDS, "taking new weights")

    def sleep(self, *, deep: bool = False) -> None:
        """See ``Executor.sleep``; a deep sleep has no runners."""
        if not deep:
            self.wait(self._on_all("sleep"), RUNNER_ADOPTION_SECONDS, "freeing pages")
            return
        self.epoch += 1  # first: pings that they do not answer are of an epoch before
        self.stop()

    @property
    def sleeps_deep(self) -> bool:
        """Whether there are no runners."""
        return not self._runners

    def load(self) -> None:
        """See ``Executor.load``."""
        if self.sleeps_deep:
            self.wake()
            self.sleep()

    def wake(self) -> None:
        """See ``Executor.wake``."""
        self.epoch += 1
        if self.sleeps_deep:
            self._start_new(RUNNER_PROCESS_SECONDS)
            return
        start = self._on_all("start", self._config, self.epoch)
        self.wait(start, MODEL_LOAD_SECONDS, "allocating pages")

    def ping(self) -> Any:
        """Pings all runners, so that idle ones stay; returns refs, or None without runners."""
        return self._on_all("ping") or None

    def alive(self, ping: Any) -> bool | None:
        """Whether a ``ping`` was answered, or None if it is pending."""
        answered, missing = ray.wait(ping, num_returns=len(ping), timeout=0)
        try:
            ray.get(answered)
        except ActorUnavailableError:  # the call was lost; the next ping decides
            return True
        except RayError:
            return False
        return None if missing else True

    @property
    def processes(self) -> list[Process]:
        """The runners' processes, once they have started."""
        return list(self._processes)

    def close(self) -> None:
        """Kills the runners and their spares, for good.

        Raises:
            RunnerGroupFailed: the runners cannot be killed.
        """
        self.spares.close()
        self.stop()

    def stop(self) -> None:
        """Kills the runners; returns when their processes have ended and their memory is free.

        Raises:
            RunnerGroupFailed: they cannot be killed.
        """
        for process in self._processes:
            if not end_process(process):
                raise RunnerGroupFailed(f"the old runner cannot be killed: {process}")
        for runner in self._runners:
            ray.kill(runner)
        self._runners, self._processes = [], []
        self._close_link()

    def wait(self, refs: list[Any] | None, seconds: float, what: str) -> list[Any]:
        """Waits for the values of ``refs``, one of each rank; no ``refs`` means a dropped call.

        Raises:
            RunnerGroupFailed: a runner has died, raised, or not answered within ``seconds``.
            CallLost: it is unknown whether a runner received the call.
            Fenced: the runners belong to another scheduler.
        """

        def get(slice: float) -> list[Any]:
            if refs is None:
                time.sleep(slice)
                raise TimeoutError
            values: list[Any] = ray.get(refs, timeout=slice)
            return values

        return self.hear(get, seconds, what)

    def hear(self, get: Callable[[float], list[Any]], seconds: float, what: str) -> list[Any]:
        """``wait`` for what ``get`` returns, which raises TimeoutError after the seconds given."""
        self.waits = True
        try:
            return self._hear(get, seconds, what)
        finally:
            self.waits = False

    def _hear(self, get: Callable[[float], list[Any]], seconds: float, what: str) -> list[Any]:
        deadline = time.monotonic() + seconds
        pings: list[Any] = [None] * len(self._runners)
        while True:
            try:
                return get(WAIT_SLICE_SECONDS)
            except RayTaskError as error:  # a TimeoutError as well, if that is what a step raised
                if isinstance(error.cause, Fenced):
                    raise error.cause from None
                if isinstance(error.cause, StepMissing):
                    raise CallLost(describe(error)) from error
                # PeerLost: another rank failed, which raises its own error if a step did it.
                caused_by_step = not isinstance(error.cause, PeerLost)
                raise RunnerGroupFailed(describe(error), caused_by_step=caused_by_step) from error
            except TimeoutError:  # Ray's is one too
                pass
            except ActorUnavailableError as error:
                raise CallLost(describe(error)) from error
            except RayError as error:
                raise RunnerGroupFailed(describe(error)) from error
            self._on_wait()
            if len(pings) > 1:
                # A rank without work waits for the others, and its lease would end.
                for rank, ping in enumerate(pings):
                    if ping is None or ray.wait([ping], timeout=0)[0]:
                        pings[rank] = self._runners[rank].ping.remote()
            if time.monotonic() > deadline:
                raise RunnerGroupFailed(f"{what} has taken over {seconds:.1f} s: the runner hangs")

    def _adopt(self) -> Adoption | None:
        """Adopts live runners if all of them have the model; else kills them and returns None."""
        self._find_runners()
        if len(self._runners) < len(self._names):
            self.stop()
            return None
        adopted: list[Adoption | None] = [None]
        try:
            self._processes = self.wait(
                self._on_all("process"), RUNNER_ADOPTION_SECONDS, "its process"
            )
            adopt = self._on_all("adopt", self._args, self._args.identity, self.generation)
            adopted = self.wait(adopt, RUNNER_ADOPTION_SECONDS, "its last step")
        except RunnerGroupFailed as failure:
            logger.warning("%s cannot be adopted: %s", ", ".join(self._names), failure)
        if any(answer != adopted[0] for answer in adopted) or adopted[0] is None:
            self.stop()
            return None
        # A rank may have run a step that another one has not.
        others = [answer.names for answer in adopted[1:] if answer is not None]
        for page, name in adopted[0].names.items():
            if all(names.get(page) == name for names in others):
                self.names[page] = name
        return adopted[0]

    def _find_runners(self) -> None:
        """Finds the live runners, by rank.

        The only runner of an engine with spares may have any of its names. Its spares are ended,
        for they may be of another version of the code: the next ones are this scheduler's.
        """
        names = self.spares.names if len(self.spares.names) > 1 else self._names
        actors = {name: actor for name in names if (actor := find_actor(name)) is not None}
        if names is not self._names:
            serving = self._serving(actors)
            for name in actors.keys() - {serving}:
                ray.kill(actors.pop(name))
            if serving is not None:
                self.spares.serving = self._names[0] = serving
        self._runners = list(actors.values())

    def _serving(self, actors: Mapping[str, Any]) -> str | None:
        """Which of the actors has pages. If none says so, the one that says nothing: it may be busy
        with a step, or hang."""
        asked = {actor.ping.remote(): name for name, actor in actors.items()}
        deadline = time.monotonic() + SPARE_ANSWER_SECONDS
        while asked and time.monotonic() < deadline:
            self._on_wait()
            for ref in ray.wait(list(asked), timeout=WAIT_SLICE_SECONDS)[0]:
                name = asked.pop(ref)
                try:
                    if ray.get(ref).serves:
                        return name
                except RayError as error:
                    logger.warning("%s cannot be adopted: %s", name, describe(error))
        return next(iter(asked.values()), None)

    def _on_all(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of each runner; returns refs by rank."""
        return [getattr(runner, method).remote(*arguments) for runner in self._runners]

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._on_wait()
            time.sleep(min(left, WAIT_SLICE_SECONDS))

    def _start_new(self, patience: float) -> EngineConfig:
        """Starts all ranks; ``patience`` seconds are for the processes, not for their model."""
        self.watchdog.restart()
        self.spares.rest()
        if (spare := self.spares.take()) is None:
            for rank in range(len(self._names)):
                self._runners.append(self._new_runner(rank))
        else:
            logger.warning("the spare runner %s takes over", spare.name)
            self._names[0], self._runners = spare.name, [spare.runner]
            self._processes = [spare.process] if spare.process else []  # stop() ends them
            patience = SPARE_ANSWER_SECONDS
        load = "loading the model"
        try:
            self._processes = self.wait(self._on_all("process"), patience, "starting")
            loaded = self.wait(self._load(), MODEL_LOAD_SECONDS, load)
            if self._config is None:
                facts, limits = zip(*loaded, strict=True)
                self._config = resolve(self._args, scarcest(facts), limits[0])
            start = self._on_all("start", self._config, self.epoch)
            self.wait(start, MODEL_LOAD_SECONDS, load)
            self._open_link()
            self.spares.rest()
        except RunnerGroupFailed as failure:
            task = failure.__cause__
            cause = task.cause if isinstance(task, RayTaskError) else None
            if isinstance(cause, RayfinError) and not isinstance(cause, PeerLost):
                raise cause from None
            raise
        self.prepare(())  # the vocabulary loads beside the first steps
        return self._config

    def _open_link(self) -> None:
        """Connects to an only runner; a GPU's steps come by two calls (``execute_ahead``)."""
        self._close_link()
        if len(self._runners) == 1 and self._args.device != "cuda":
            try:
                listen = self.wait(self._on_all("listen"), RUNNER_ADOPTION_SECONDS, "its socket")
            except RunnerGroupFailed as failure:  # the first step will say more
                logger.warning("Ray carries the steps: %s", failure)
                return
            self._link = open_link(listen[0])

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _load(self) -> list[Any]:
        measure = self._config is None
        if len(self._runners) == 1:
            return self._on_all("load", self._args, 0, None, measure, self.version)
        first = [self._runners[0].open_store.remote()]
        (store,) = self.wait(first, MODEL_LOAD_SECONDS, "opening a store")
        return [
            runner.load.remote(self._args, rank, store, measure, self.version)
            for rank, runner in enumerate(self._runners)
        ]

    def _new_runner(self, rank: int) -> Any:
        return when_name_is_free(lambda: self._create(self._names[rank], rank))

    def _create_spare(self, name: str) -> Any | None:
        """A spare's actor; None if the name is not free yet, or this scheduler was replaced."""
        try:
            return self._create(name, spare=True) if self._may_restart() else None
        except ValueError:
            return None

    def _create(self, name: str, rank: int = 0, *, spare: bool = False) -> Any:
        """Creates a runner's actor.

        Raises:
            ValueError: another actor has the name.
        """
        options: dict[str, Any] = {
            "num_cpus": 0 if spare else self._args.place.cpus,
            "name": name,
            "namespace": NAMESPACE,
            "enable_task_events": False,  # Ray's GCS would keep a record of each step
        }
        if self._detached:
            options["lifetime"] = "detached"
        if self._args.device == "cuda":
            options["num_gpus"] = self._args.place.gpus
        if self._placement is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._placement,
                placement_group_bundle_index=rank // self._args.tensor_parallel_size,
            )
        actor_class: Any = ModelRunnerActor  # Ray's stubs lose `options` on a decorated class
        return actor_class.options(**options).remote()

    def _submit_planted(self, info: SchedulerInfo) -> _RemoteStep:
        assert failpoints.ACTIVE is not None
        match failpoints.ACTIVE.hit_step("group.submit", info):
            case "drop":
                return _RemoteStep(self, None, info)
            case "duplicate":
                self.send(info)
        return _RemoteStep(self, self.send(info), info)


def _answer(ref: Any) -> Future[Any]:
    answer: Future[Any] = ref.future()
    return answer
