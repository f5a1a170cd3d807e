"""Faults on purpose, at named places of the actors: what fault tests plant. Off unless asked for.

    RAYFIN_FAILPOINTS="runner.before_reply=exit@step:20@once:/tmp/x;runner.row=raise@token:777"
    RAYFIN_FAILPOINTS="@/tmp/faults"     the same text in a file, read again whenever it changes

    point                    where                                       passed to it
    runner.load              before the model is loaded
    runner.before_execute    a step has come, nothing has run            epoch, step, its tokens
    runner.row               one row of a step is about to be computed   epoch, step, its tokens
    runner.before_reply      a step has run, its answer is not sent      epoch, step, its tokens
    runner.page              a page is about to be checked (--check-pages)
    runner.image             an image is encoded, no step has read its embeddings
    runner.record            a page or a state is about to be sent to another engine
    peers.sum                a sum over tensor parallel ranks is about to be made
    scheduler.start          the scheduler is about to start or adopt runners
    scheduler.tick           every turn of the scheduler's loop
    group.submit             a step is about to be sent                  epoch, step, its tokens
    group.reply              a step's answer has come                    epoch, step, its tokens
    supervisor.check         every health check
    weights.stage            a scheduler is asked about new weights
    weights.vote             a runner is asked about them
    weights.decide           all engines are paused, the coordinator is about to decide
    weights.current          a scheduler has made them CURRENT, no runner has them
    weights.layer            a runner is about to put them into the model
    weights.reply            they are in, the coordinator does not know it
    weights.resume           a scheduler is about to go on

    action                   what happens there
    exit                     the process is killed, as by SIGKILL
    stop                     the process is stopped, as by SIGSTOP
    raise[:message]          InjectedFault
    oom                      MemoryError
    sleep:seconds            the thread sleeps; others continue
    hang:seconds             no thread of the process runs Python: the interpreter's lock is held
    nan                      (runner.row) the row's logits become not a number
    drop                     (group.submit, group.reply, peers.sum) it is lost; (runner.record) half
                             of it is, with the connection
    flip                     (runner.page, runner.record) one of its bits flips
    duplicate                (group.submit) it is sent twice

    condition                it happens only
    step:N, epoch:N          in that step, in that epoch
    token:N                  where that token is among the tokens computed
    nth:N                    the Nth time that the other conditions hold, from 1
    p:X[:seed]               with that probability
    once[:path]              once in this process; with a path, once among all that share it

Source of the idea: FreeBSD's and etcd's failpoints. A place costs one comparison while it is off.
"""

import ctypes
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rayfin.actors.errors import InjectedFault, InvalidConfig
from rayfin.actors.messages import Int32Array, SchedulerInfo

VARIABLE = "RAYFIN_FAILPOINTS"

POINTS = (
    "runner.load",
    "runner.before_execute",
    "runner.row",
    "runner.before_reply",
    "runner.page",
    "runner.image",
    "runner.record",
    "peers.sum",
    "scheduler.start",
    "scheduler.tick",
    "group.submit",
    "group.reply",
    "supervisor.check",
    *("weights.stage", "weights.vote", "weights.decide", "weights.current"),
    *("weights.layer", "weights.reply", "weights.resume"),
)
ACTIONS = ("exit", "stop", "raise", "oom", "sleep", "hang", "nan", "drop", "duplicate", "flip")
CONDITIONS = ("step", "epoch", "token", "nth", "p", "once")
FOR_THE_CALLER = ("nan", "drop", "duplicate", "flip")


@dataclass(slots=True)
class _Fault:
    """One entry of the text."""

    point: str
    action: str
    argument: str
    conditions: dict[str, str]
    hits: int = 0  # times that all conditions but ``nth`` held
    done: bool = False
    draws: random.Random = field(default_factory=random.Random)

    def fires(self, epoch: int | None, step: int | None, tokens: Int32Array | None) -> bool:
        wanted = self.conditions
        if self.done or ("p" in wanted and self.draws.random() >= float(wanted["p"])):
            return False
        for name, value in (("epoch", epoch), ("step", step)):
            if name in wanted and value != int(wanted[name]):
                return False
        if "token" in wanted and (tokens is None or int(wanted["token"]) not in tokens):
            return False
        self.hits += 1
        if "nth" in wanted and self.hits != int(wanted["nth"]):
            return False
        return "once" not in wanted or self._is_first()

    def _is_first(self) -> bool:
        self.done = True
        if path := self.conditions["once"]:
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
        return True


class Failpoints:
    """The faults planted in this process."""

    def __init__(self, text: str) -> None:
        self._path = Path(text[1:]) if text.startswith("@") else None
        self._changed = -1
        self._faults = {} if self._path else parse(text)

    def hit(
        self,
        point: str,
        *,
        epoch: int | None = None,
        step: int | None = None,
        tokens: Int32Array | None = None,
    ) -> str | None:
        """Carries out the faults that are planted at ``point``.

        Returns:
            "nan", "drop", "duplicate" or "flip", which the caller carries out; or None.

        Raises:
            InjectedFault, MemoryError: as planted.
        """
        self._read_file()
        for fault in self._faults.get(point, ()):
            if fault.fires(epoch, step, tokens):
                if fault.action in FOR_THE_CALLER:
                    return fault.action
                _carry_out(fault)
        return None

    def hit_step(self, point: str, info: SchedulerInfo) -> str | None:
        """``hit`` with epoch, number and tokens of a step."""
        return self.hit(point, epoch=info.epoch, step=info.step, tokens=info.merge_prompt)

    def _read_file(self) -> None:
        if self._path is None:
            return
        try:
            changed = self._path.stat().st_mtime_ns
            if changed != self._changed:
                self._faults = parse(self._path.read_text())
                self._changed = changed
        except OSError:  # no file: nothing is planted
            self._faults, self._changed = {}, -1


def parse(text: str) -> dict[str, list[_Fault]]:
    """The faults of a text, by point.

    Raises:
        InvalidConfig: an entry with an unknown point, action or condition.
    """
    faults: dict[str, list[_Fault]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        what, *conditions = entry.split("@")
        point, _, action = what.partition("=")
        action, _, argument = action.partition(":")
        named = {
            name: value for name, _, value in (condition.partition(":") for condition in conditions)
        }
        if point not in POINTS or action not in ACTIONS or not set(named) <= set(CONDITIONS):
            raise InvalidConfig(f"{VARIABLE}: {entry!r} is not a fault (see actors/failpoints.py)")
        seed = None
        if "p" in named:
            named["p"], _, seed = named["p"].partition(":")
        source = random.Random(seed or entry)
        faults.setdefault(point, []).append(_Fault(point, action, argument, named, draws=source))
    return faults


def _carry_out(fault: _Fault) -> None:
    match fault.action:
        case "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise InjectedFault(fault.argument or f"planted at {fault.point}")
        case "oom":
            raise MemoryError(f"planted at {fault.point}")
        case "sleep":
            time.sleep(float(fault.argument))
        case "hang":
            _hold_interpreter(float(fault.argument))


def _hold_interpreter(seconds: float) -> None:
    """Sleeps without giving up the interpreter's lock: PyDLL keeps it during a call."""
    usleep: Callable[[int], int] = ctypes.PyDLL(None).usleep
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:  # a signal may end the sleep early
        usleep(int(left * 1e6) + 1)


ACTIVE: Failpoints | None = Failpoints(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
"""The planted faults; None, as in production, where the variable is not set."""
