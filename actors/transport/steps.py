"""Steps to an engine's only runner by a socket, where both are on one machine.

What became of a runner whose socket breaks is not known here: its steps are sent again by Ray,
which says so, and a runner runs no step twice.
"""

import logging
import socket
from collections.abc import Callable

from rayfin.actors.errors import CallLost, Fenced, RayfinError, RunnerGroupFailed, StepMissing
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.transport.channel import Acceptor, Channel, connect

logger = logging.getLogger(__name__)

Answer = StepResult | RayfinError | str
"""A step's result, or why it failed: other errors in one line, as they may not pickle."""


class StepSocket:
    """The runner's end: runs the steps of each connection in a thread, in order.

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
        channel = Channel(connected)
        for info in channel:
            channel.send((info.epoch, info.step, self._answer(info)))

    def _answer(self, info: SchedulerInfo) -> Answer:
        try:
            return self._run(info)
        except RayfinError as error:
            return error
        except Exception as error:
            logger.exception("step %d failed", info.step)
            line = next(iter(str(error).strip().splitlines()), "")
            return f"{type(error).__name__}: {line}"


class StepLink:
    """The scheduler's end; for one thread.

    Attributes:
        broken: the runner's end has gone.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.broken = False
        self._channel = Channel(connected)
        self._answers: dict[tuple[int, int], Answer] = {}  # by epoch and step

    def takes(self, info: SchedulerInfo) -> bool:
        """Returns whether it can carry the step.

        Ray counts the references to arrays in its store, so it must carry them.
        """
        parts = (part for new in info.new_requests for part in new.parts)
        return not self.broken and not any(part.by_reference for part in parts)

    def send(self, info: SchedulerInfo) -> None:
        """Sends a step without waiting; one that cannot be packed breaks the link."""
        try:
            self._channel.send(info)
        except Exception:
            logger.exception("step %d goes by Ray", info.step)
            self.close()

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
        for older in [known for known in self._answers if known < wanted]:
            del self._answers[older]
        return _result(answer)

    def close(self) -> None:
        self.broken = True
        self._channel.close()

    def _receive(self, seconds: float) -> None:
        if self.broken:
            raise CallLost("the runner's socket is closed")
        try:
            epoch, step, answer = self._channel.receive(seconds)
        except TimeoutError:
            raise
        except Exception as error:  # the connection broke, or bytes that are no message
            logger.warning("the runner's socket: %s", error)
            self.close()
        else:
            self._answers[epoch, step] = answer


def open_link(address: str) -> StepLink | None:
    """Connects to a runner; None where Ray must carry its steps: it is on another machine, say."""
    if not address:
        return None
    try:
        return StepLink(connect(address))
    except OSError as error:
        logger.debug("Ray carries the steps: %s", error)
        return None


def _result(answer: Answer) -> StepResult:
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
