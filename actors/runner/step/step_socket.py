"""Takes steps from a scheduler on this machine by a socket, past Ray.

``actors/scheduler/step_link.py`` is the other end.
"""

import logging
import socket
from collections.abc import Callable

from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.processes.local_socket import Acceptor, messages_of, packed

logger = logging.getLogger(__name__)


class StepSocket:
    """Runs the steps of each connection in a thread, in the order in which they come.

    Args:
        run: a step; called from several threads where a scheduler takes over from another.
    """

    def __init__(self, run: Callable[[SchedulerInfo], StepResult]) -> None:
        self._run = run
        self._acceptor = Acceptor(self._serve, "steps")

    def address(self) -> str:
        """Returns what one scheduler connects to, once; empty where there are no such sockets."""
        return self._acceptor.address()

    def _serve(self, connected: socket.socket) -> None:
        for info in messages_of(connected):
            answer = self._answer(info)
            connected.sendall(packed((info.epoch, info.step, answer)))

    def _answer(self, info: SchedulerInfo) -> StepResult | RayfinError | str:
        """The step's result, or why it failed: other errors in one line, as they may not pickle."""
        try:
            return self._run(info)
        except RayfinError as error:
            return error
        except Exception as error:
            logger.exception("step %d failed", info.step)
            line = next(iter(str(error).strip().splitlines()), "")
            return f"{type(error).__name__}: {line}"
