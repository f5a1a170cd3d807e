"""The runner in this process, behind the executor's interface: no Ray, no second process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayfin.actors.config import EngineConfig
from rayfin.actors.errors import RequestFailed
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.runner.model_runner import ModelRunner


@dataclass(slots=True)
class _Deferred:
    """A step that runs when its result is asked for."""

    run: Callable[[SchedulerInfo], StepResult]
    info: SchedulerInfo

    def result(self) -> StepResult:
        return self.run(self.info)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Grammars that have been compiled; ``failure`` says why one was not."""

    failure: str | None

    def done(self) -> bool:
        return True

    def error(self) -> str | None:
        return self.failure


class InlineExecutor:
    """Runs each step when its result is asked for, in the order of submission.

    An exception of a step is the caller's: there is no process to restart.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self.epoch = 0
        self._runner = runner
        self._config = config
        runner.start(config, self.epoch)

    def submit(self, info: SchedulerInfo) -> _Deferred:
        return _Deferred(self._runner.execute, info)

    def prepare(self, grammars: Sequence[str]) -> _Prepared:
        """Compiles grammars for requests to come, at once."""
        try:
            self._runner.prepare(grammars)
        except RequestFailed as error:
            return _Prepared(str(error))
        return _Prepared(None)

    def restart(self) -> None:
        """Empties the runner."""
        self.epoch += 1
        self._runner.start(self._config, self.epoch)

    def sleep(self) -> None:
        self._runner.sleep()

    def wake(self) -> None:
        self.restart()
