"""An engine that starts beside Serve, before the process that will watch it.

Serve's controller, proxy and replicas take seconds to start, one after the other. The engine needs
none of them, so the program that starts the application starts its engine first. The supervisor in
Serve's replica claims it as one whose supervisor has died (``SchedulerActor.claim``).
"""

import asyncio
import logging
import threading

import ray
from ray.exceptions import RayError

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, InvalidConfig, NoRoomNow, RayfinError
from rayfin.actors.supervision.supervisor import Supervisor
from rayfin.actors.timing import RUNNER_PROCESS_SECONDS

logger = logging.getLogger(__name__)


class EarlyEngine:
    """Starts an engine in a thread.

    An engine that does not start is ended. The supervisor then finds none, and starts another one.
    Serve repeats that a few times before it reports the reason. ``refusal`` holds the reason as
    soon as the engine has refused its model. A refusal for memory that was not free is not held
    (``NoRoomNow``): the supervisor's start measures again.

    Args:
        args: its settings, those of the supervisor that is to claim it.
        prefix: of its name, as the supervisor's.
    """

    def __init__(self, args: EngineArgs, prefix: str) -> None:
        self.refusal: InvalidConfig | None = None
        self._supervisor = Supervisor(args, prefix, detached=True)
        self._supervisor.place_ahead()
        threading.Thread(target=self._launch, name="engine-ahead", daemon=True).start()

    def await_scheduler(self) -> None:
        """Returns when its scheduler answers: a supervisor that comes now will wait for it.

        One that comes before would take it for hung, and start another engine.
        """
        try:
            ray.get(self._supervisor.scheduler.process.remote(), timeout=RUNNER_PROCESS_SECONDS)
        except RayError as error:
            logger.warning("engine %s does not start: %s", self._supervisor.name, error)
            self._supervisor.stop()

    def _launch(self) -> None:
        try:
            asyncio.run(self._supervisor.launch_ahead())
        except Exception as error:
            name = self._supervisor.name
            self.refusal = _refusal(error)
            if self.refusal is None:
                # A process has died, memory was short, or the program ends: the supervisor's
                # replica reports it.
                logger.info("engine %s has not started ahead: %s", name, error)


def _refusal(error: Exception) -> InvalidConfig | None:
    """The reason why the model can never be served, None for an error that may pass."""
    if not isinstance(error, RayfinError) or isinstance(error, (EngineUnavailable, NoRoomNow)):
        return None
    if isinstance(error, InvalidConfig):
        return error
    # As the deployment's report of the same error is read.
    return InvalidConfig(error.message, error.param)
