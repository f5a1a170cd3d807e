"""The runners of one engine, and the only file that knows how a step reaches them.

The channel is plain Ray: a SchedulerInfo goes out as the argument of an actor call, whose object
ref stands for the step until its StepResult is asked for. With two steps in flight the way there
and back is hidden behind the step before. What was measured against the alternatives (``ray.put``
and a shared ref, which costs more than it saves for one rank): docs/architecture.md.
"""

import logging
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfin.actors import failpoints
from rayfin.actors.config import EngineArgs, EngineConfig, resolve
from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.runner.actor import ModelRunnerActor
from rayfin.actors.scheduler.executor import GroupFailed

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _RemoteStep:
    """A step on a runner; rank 0 answers for all."""

    ref: Any  # ObjectRef of a StepResult; None: a step that was lost on purpose
    info: SchedulerInfo

    def result(self) -> StepResult:
        if self.ref is None:
            raise GroupFailed("the step was lost")
        try:
            result: StepResult = ray.get(self.ref)
        except RayError as error:
            raise GroupFailed(describe(error)) from error
        if failpoints.ACTIVE and failpoints.ACTIVE.hit_step("group.reply", self.info) == "drop":
            raise GroupFailed("the answer was lost")
        return result


class RunnerGroup:
    """Starts the runners in their placement group, sends them steps, replaces them.

    The runners belong to the process that holds the group and die with it.
    """

    def __init__(self, args: EngineArgs, placement: PlacementGroup | None = None) -> None:
        self.epoch = 0
        self._args = args
        self._placement = placement
        self._runner: Any = None
        self._config: EngineConfig | None = None

    def start(self) -> EngineConfig:
        """Loads the model and allocates its pages; blocks until steps can be sent.

        Raises:
            InvalidConfig, UnsupportedModel: the model cannot be served.
            GroupFailed: a runner died on the way.
        """
        self._runner = self._new_runner()
        try:
            facts, limits = ray.get(self._runner.load.remote(self._args))
            if self._config is None:
                self._config = resolve(self._args, facts, limits)
            ray.get(self._runner.start.remote(self._config, self.epoch))
        except RayTaskError as error:
            if isinstance(error.cause, RayfinError):
                raise error.cause from None
            raise GroupFailed(describe(error)) from error
        except RayError as error:
            raise GroupFailed(describe(error)) from error
        return self._config

    def submit(self, info: SchedulerInfo) -> _RemoteStep:
        """Sends a step without waiting. Steps run in the order in which they are sent."""
        if failpoints.ACTIVE:
            return self._submit_planted(info)
        return _RemoteStep(self._runner.execute.remote(info), info)

    def _submit_planted(self, info: SchedulerInfo) -> _RemoteStep:
        assert failpoints.ACTIVE is not None
        match failpoints.ACTIVE.hit_step("group.submit", info):
            case "drop":
                return _RemoteStep(None, info)
            case "duplicate":
                self._runner.execute.remote(info)
        return _RemoteStep(self._runner.execute.remote(info), info)

    def restart(self) -> None:
        """Kills the runners and starts new ones under a new epoch; the page count stays."""
        logger.warning("restarting the runners of epoch %d", self.epoch)
        ray.kill(self._runner)
        self.epoch += 1
        self.start()

    def pids(self) -> list[int]:
        """Process ids of the runners."""
        return [ray.get(self._runner.pid.remote())]

    def _new_runner(self) -> Any:
        options: dict[str, Any] = {"num_cpus": 1}
        if self._args.device == "cuda":
            options["num_gpus"] = 1
        if self._placement is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=0
            )
        actor_class: Any = ModelRunnerActor  # Ray's stubs lose `options` on a decorated class
        return actor_class.options(**options).remote()


def describe(error: RayError) -> str:
    """One line about what happened to a runner."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    first_line = next(iter(str(cause).strip().splitlines()), "")
    return f"{type(cause).__name__}: {first_line}"
