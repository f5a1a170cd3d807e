"""The runners of one engine, and the only file that knows how a step reaches them.

The channel is plain Ray: a SchedulerInfo goes out as the argument of an actor call, whose object
ref stands for the step until its StepResult is asked for. With two steps in flight the way there
and back is hidden behind the step before. What was measured against the alternatives (``ray.put``
and a shared ref, which costs more than it saves for one rank): docs/architecture.md.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rayfin.actors import failpoints
from rayfin.actors.config import EngineArgs, EngineConfig, resolve
from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.processes import Process, end
from rayfin.actors.runner.actor import GENERATION_BITS, Adoption, ModelRunnerActor
from rayfin.actors.scheduler.executor import Fenced, GroupFailed, StepMissing
from rayfin.actors.scheduler.watchdog import Watchdog

logger = logging.getLogger(__name__)

NAMESPACE = "rayfin"
"""Ray namespace in which scheduler and runner actors are registered, so that all find them."""

SLICE_SECONDS = 1.0
LOAD_SECONDS = 1800.0
PROCESS_SECONDS = 60.0
ADOPT_SECONDS = 15.0
GONE_SECONDS = 20.0
"""Patience with: a turn of waiting, a model that loads or a node that is yet to come, the process
of a runner's successor (on a full disk Ray may never tell that it could not be started), a runner
that finishes its last step before it is taken over, and a process that was killed."""

RESEND_SECONDS, RESEND_PAUSE_SECONDS = 1.0, 0.02
"""A step whose call was lost is sent again for so long, so often; then its runner is given up."""


class CallLost(GroupFailed):
    """A call or its answer was lost on its way; the runner may well live."""


@dataclass(slots=True)
class _RemoteStep:
    """A step on a runner; rank 0 answers for all."""

    group: "RunnerGroup"
    ref: Any  # ObjectRef of a StepResult; None: a step that was lost on purpose
    info: SchedulerInfo

    def result(self) -> StepResult:
        """Its answer. A call that was lost is made again: a runner runs no step twice."""
        group, patience = self.group, self.group.watchdog.patience(self.info)
        lost_since: float | None = None
        while True:
            try:
                result: StepResult = group.wait(self.ref, patience, "the step")
                break
            except CallLost as lost:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > RESEND_SECONDS:
                    raise
                logger.warning("step %d is sent again: %s", self.info.step, lost)
                time.sleep(RESEND_PAUSE_SECONDS)
                self.ref = group.send(self.info)
        group.watchdog.observe(self.info, result.seconds)
        if failpoints.ACTIVE and failpoints.ACTIVE.hit_step("group.reply", self.info) == "drop":
            return group.wait(None, patience, "the step")  # type: ignore[no-any-return]
        return result


class RunnerGroup:
    """Starts the runners of the engine ``name`` in their placement group, or adopts those that
    live; sends them steps, replaces them.

    Args:
        generation: of the scheduler that this belongs to; a later one's steps fence an earlier's.
        known: the runner's process, where somebody knows of one; a hung one cannot tell.
        detached: the runners outlive this process, until nobody has sent a step or a ping for
            ``RUNNER_LEASE_SECONDS``. Otherwise they die with it.
        on_wait: called at least once a second while this waits for runners.
        may_restart: asked before runners are replaced; a scheduler that was replaced may not.
    """

    def __init__(
        self,
        args: EngineArgs,
        name: str,
        placement: PlacementGroup | None = None,
        *,
        generation: int = 0,
        known: Process | None = None,
        detached: bool = False,
        on_wait: Callable[[], None] = lambda: None,
        may_restart: Callable[[], bool] = lambda: True,
    ) -> None:
        self.epoch = generation << GENERATION_BITS
        self.watchdog = Watchdog()
        self._args = args
        self._name = runner_name(name)
        self._placement = placement
        self._detached = detached
        self._on_wait = on_wait
        self._may_restart = may_restart
        self._runner: Any = None
        self._process = known
        self._config: EngineConfig | None = None

    @property
    def generation(self) -> int:
        return self.epoch >> GENERATION_BITS

    def start(self) -> EngineConfig:
        """Adopts the runners of this name, or loads the model in new ones and allocates its pages;
        blocks until steps can be sent.

        Raises:
            InvalidConfig, UnsupportedModel: the model cannot be served.
            GroupFailed: a runner died on the way.
        """
        if (adopted := self._adopt()) is not None:
            self._config, self.epoch = adopted.config, adopted.epoch
            logger.warning("adopted %s at epoch %d", self._name, self.epoch)
            return self._config
        return self._start_new(LOAD_SECONDS)

    def submit(self, info: SchedulerInfo) -> _RemoteStep:
        """Sends a step without waiting. Steps run in the order in which they are sent."""
        if failpoints.ACTIVE:
            return self._submit_planted(info)
        return _RemoteStep(self, self.send(info), info)

    def send(self, info: SchedulerInfo) -> Any:
        """One call for a step; the ref of its answer."""
        return self._runner.execute.remote(info)

    def restart(self) -> None:
        """Kills the runners and starts new ones under a new epoch; the page count stays.

        Raises:
            GroupFailed: the new ones cannot be started, or the old ones not be killed.
            Fenced: this scheduler has been replaced.
        """
        if not self._may_restart():
            raise Fenced("another scheduler has taken over")
        logger.warning("restarting the runners of epoch %d", self.epoch)
        self.stop()
        self._pause(self.watchdog.backoff())
        self.epoch += 1
        self._start_new(PROCESS_SECONDS)

    def sleep(self) -> None:
        """See ``Executor.sleep``."""
        self.wait(self._runner.sleep.remote(), ADOPT_SECONDS, "to give pages back")

    def wake(self) -> None:
        """See ``Executor.wake``."""
        self.epoch += 1
        start = self._runner.start.remote(self._config, self.epoch)
        self.wait(start, LOAD_SECONDS, "taking pages")

    def ping(self) -> Any:
        """Keeps idle runners from leaving; the ref fails when they have died; None without any."""
        runner = self._runner
        return None if runner is None else runner.ping.remote()

    def alive(self, ping: Any) -> bool | None:
        """Whether a ``ping`` was answered; None: not yet."""
        if not ray.wait([ping], timeout=0)[0]:
            return None
        try:
            ray.get(ping)
        except ActorUnavailableError:  # the call was lost; the next one tells
            return True
        except RayError:
            return False
        return True

    @property
    def process(self) -> Process | None:
        """The runner's, once it has started."""
        return self._process

    def stop(self) -> None:
        """Kills the runners, and returns when they are gone, and their memory with them.

        Raises:
            GroupFailed: they cannot be killed.
        """
        if self._process is not None and not end_process(self._process):
            raise GroupFailed(f"the old runner cannot be killed: {self._process}")
        if self._runner is not None:
            ray.kill(self._runner)
        self._runner = self._process = None

    def wait(self, ref: Any, seconds: float, what: str) -> Any:
        """The value of ``ref``, None for one that never comes.

        Raises:
            GroupFailed: the runner has died, or not answered in so many seconds.
            CallLost: nobody knows whether it has had the call.
            Fenced: it belongs to another scheduler.
            RayfinError: what the runner raised.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                if ref is not None:
                    return ray.get(ref, timeout=SLICE_SECONDS)
                time.sleep(SLICE_SECONDS)
            except GetTimeoutError:
                pass
            except RayTaskError as error:
                if isinstance(error.cause, Fenced):
                    raise error.cause from None
                if isinstance(error.cause, StepMissing):
                    raise CallLost(describe(error)) from error
                raise GroupFailed(describe(error), by_step=True) from error
            except ActorUnavailableError as error:
                raise CallLost(describe(error)) from error
            except RayError as error:
                raise GroupFailed(describe(error)) from error
            self._on_wait()
            if time.monotonic() > deadline:
                raise GroupFailed(f"{what} has taken over {seconds:.1f} s: the runner hangs")

    def _adopt(self) -> Adoption | None:
        """The runner that lives under the name, if it has the model; else it is ended."""
        try:
            self._runner = ray.get_actor(self._name, namespace=NAMESPACE)
        except ValueError:
            self.stop()
            return None
        adopted: Adoption | None = None
        try:
            self._process = self.wait(
                self._runner.process.remote(), ADOPT_SECONDS, "a sign of life"
            )
            adopt = self._runner.adopt.remote(self._args, self.generation)
            adopted = self.wait(adopt, ADOPT_SECONDS, "its last step")
        except GroupFailed as failure:
            logger.warning("%s cannot be adopted: %s", self._name, failure)
        if adopted is None:
            self.stop()
        return adopted

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._on_wait()
            time.sleep(min(left, SLICE_SECONDS))

    def _start_new(self, patience: float) -> EngineConfig:
        """Waits so many seconds for the process, and then for its model."""
        self.watchdog.restart()
        self._runner = self._new_runner()
        load = "loading the model"
        try:
            self._process = self.wait(self._runner.process.remote(), patience, "starting")
            facts, limits = self.wait(self._runner.load.remote(self._args), LOAD_SECONDS, load)
            if self._config is None:
                self._config = resolve(self._args, facts, limits)
            self.wait(self._runner.start.remote(self._config, self.epoch), LOAD_SECONDS, load)
        except GroupFailed as failure:
            task = failure.__cause__
            if isinstance(task, RayTaskError) and isinstance(task.cause, RayfinError):
                raise task.cause from None
            raise
        return self._config

    def _new_runner(self) -> Any:
        options: dict[str, Any] = {"num_cpus": 1, "name": self._name, "namespace": NAMESPACE}
        if self._detached:
            options["lifetime"] = "detached"
        if self._args.device == "cuda":
            options["num_gpus"] = 1
        if self._placement is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=0
            )
        actor_class: Any = ModelRunnerActor  # Ray's stubs lose `options` on a decorated class
        return when_name_is_free(lambda: actor_class.options(**options).remote())

    def _submit_planted(self, info: SchedulerInfo) -> _RemoteStep:
        assert failpoints.ACTIVE is not None
        match failpoints.ACTIVE.hit_step("group.submit", info):
            case "drop":
                return _RemoteStep(self, None, info)
            case "duplicate":
                self.send(info)
        return _RemoteStep(self, self.send(info), info)


def runner_name(engine: str, rank: int = 0) -> str:
    """How a runner of an engine is called in Ray's actor registry."""
    return f"{engine}/runner/{rank}"


def when_name_is_free(create: Callable[[], Any]) -> Any:
    """What ``create`` makes; a name stays taken for a moment after its actor has died.

    Raises:
        GroupFailed: somebody else holds the name.
    """
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        try:
            return create()
        except ValueError as error:
            if time.monotonic() > deadline:
                raise GroupFailed(str(error)) from error
            time.sleep(0.05)


def end_process(process: Process) -> bool:
    """Kills a process on whichever node it runs; True once it is gone, or its node is."""
    if process.node == ray.get_runtime_context().get_node_id():
        return end(process)
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    if process.node not in alive:
        return True
    there = NodeAffinitySchedulingStrategy(process.node, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(end)
    try:
        gone: bool = ray.get(
            task.options(scheduling_strategy=there).remote(process), timeout=GONE_SECONDS
        )
    except RayError as error:
        logger.error("cannot end %s: %s", process, error)
        return False
    return gone


def describe(error: RayError) -> str:
    """One line about what happened to a runner."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    first_line = next(iter(str(cause).strip().splitlines()), "")
    return f"{type(cause).__name__}: {first_line}"
