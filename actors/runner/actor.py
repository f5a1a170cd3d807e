"""The Ray shell of a ModelRunner."""

import os

import ray

from rayfin.actors import failpoints
from rayfin.actors.config import BatchLimits, EngineArgs, EngineConfig, ModelFacts
from rayfin.actors.messages import SchedulerInfo, StepResult


@ray.remote(max_restarts=0, max_task_retries=0)
class ModelRunnerActor:
    """One process with one device. Calls run one at a time, in the order in which they are sent.

    Ray retries nothing here: a step that may or may not have run is for the scheduler to replay.
    """

    def load(self, args: EngineArgs) -> tuple[ModelFacts, BatchLimits]:
        """Loads the weights and measures the memory left for pages.

        Raises:
            InvalidConfig, UnsupportedModel: the model cannot be served.
        """
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit("runner.load")
        # Imported here, where the device is: the scheduler's process sees this class, and no torch.
        from rayfin.actors.runner.model_runner import ModelRunner

        self._runner = ModelRunner(args)
        return self._runner.profile()

    def start(self, config: EngineConfig, epoch: int) -> None:
        """Allocates the pages."""
        self._runner.start(config, epoch)

    def execute(self, info: SchedulerInfo) -> StepResult:
        """Runs a step; its answer is an object ref in the scheduler's hands meanwhile."""
        if failpoints.ACTIVE is None:
            return self._runner.execute(info)
        failpoints.ACTIVE.hit_step("runner.before_execute", info)
        result = self._runner.execute(info)
        failpoints.ACTIVE.hit_step("runner.before_reply", info)
        return result

    def pid(self) -> int:
        return os.getpid()
