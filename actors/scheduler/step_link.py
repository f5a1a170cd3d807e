"""Steps to an engine's only runner by a socket, where both are on one machine.

``actors/runner/step/step_socket.py`` is the runner's end. What became of a runner whose socket
breaks is not known here: its steps are sent again by Ray, which says so, and a runner runs no step
twice.
"""

import logging
import select
import socket
from typing import Any

from rayfin.actors.errors import CallLost, Fenced, RayfinError, RunnerGroupFailed, StepMissing
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.processes.local_socket import (
    READ_BYTES,
    SocketWriter,
    Unpacker,
    connect,
    packed,
)

logger = logging.getLogger(__name__)


class StepLink:
    """The scheduler's end; for one thread.

    Attributes:
        broken: the runner's end has gone.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.broken = False
        self._socket = connected
        self._writer = SocketWriter(connected)
        self._unpacker = Unpacker()
        self._answers: dict[tuple[int, int], Any] = {}  # by epoch and step
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)

    def takes(self, info: SchedulerInfo) -> bool:
        """Whether it can carry the step.

        Ray counts the references to arrays of images and embeddings, so it must carry them.
        """
        return not self.broken and not any(new.images or new.embeds for new in info.new_requests)

    def send(self, info: SchedulerInfo) -> None:
        """Sends a step without waiting; one that cannot be packed breaks the link."""
        try:
            data = packed(info)
        except Exception:
            logger.exception("step %d goes by Ray", info.step)
            self.close()
            return
        self._writer.write(data)

    def answer(self, info: SchedulerInfo, seconds: float) -> StepResult:
        """Waits for the result of a step; steps are asked for in the order of their sending.

        Raises:
            TimeoutError: it has not come in so many seconds.
            CallLost: the link is broken, or the runner misses the step before.
            RunnerGroupFailed: the step raised.
            Fenced: the runner belongs to another scheduler.
        """
        wanted = info.epoch, info.step
        while wanted not in self._answers:
            self._receive(seconds)
        answer = self._answers.pop(wanted)
        # A step that is sent again may be answered twice. One behind it may have an answer already:
        # that it came too early.
        for older in [own for own in self._answers if own < wanted]:
            del self._answers[older]
        return _result(answer)

    def close(self) -> None:
        self.broken = True
        self._writer.close()
        self._socket.close()

    def _receive(self, seconds: float) -> None:
        if self.broken:
            raise CallLost("the runner's socket is closed")
        if not self._readable.poll(1000 * seconds):
            raise TimeoutError
        try:
            data = self._socket.recv(READ_BYTES)
            for epoch, step, answer in self._unpacker.feed(data):
                self._answers[epoch, step] = answer
        except Exception as error:  # the connection broke, or bytes that are no message
            logger.warning("the runner's socket: %s", error)
            data = b""
        if not data:
            self.close()


def open_link(address: str) -> StepLink | None:
    """Connects to a runner; None where Ray must carry its steps: it is on another machine, say."""
    if not address:
        return None
    try:
        connected = connect(address)
    except OSError as error:
        logger.debug("Ray carries the steps: %s", error)
        return None
    connected.setblocking(True)
    return StepLink(connected)


def _result(answer: StepResult | RayfinError | str) -> StepResult:
    match answer:
        case Fenced():
            raise answer
        case StepMissing():
            raise CallLost(_described(answer))
        case RayfinError():
            raise RunnerGroupFailed(_described(answer), caused_by_step=True) from answer
        case str():
            raise RunnerGroupFailed(answer, caused_by_step=True)
    return answer


def _described(error: RayfinError) -> str:
    return f"{type(error).__name__}: {error}"
