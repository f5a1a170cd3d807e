"""Spare runners: processes that have done all that needs no engine, and take over from a dead one.

A runner's start is mostly imports, seconds of them. A spare has imported what its engine's runner
has, and mapped the weights if they are packed (``actors/runner/spare.py``). So a runner's death
pauses streams for as long as the model takes to load, or less.

A spare is no runner: it holds no pages, gets no step, and none of the engine's figures but
``spare_runners`` counts it. One that dies is made again when the runner has served for a while.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from rayfin.actors.processes.identity import Process
from rayfin.actors.runner.spare import RunnerState, SparePlan
from rayfin.actors.timing import (
    MAX_RESTART_PAUSE_SECONDS,
    PING_PATIENCE_SECONDS,
    RUNNER_PING_SECONDS,
    RUNNER_PROCESS_SECONDS,
    SPARE_CALM_SECONDS,
    SPARE_TURN_SECONDS,
    SPARE_WARM_SECONDS,
)

logger = logging.getLogger(__name__)


class SpareCalls(Protocol):
    """How spares are made, called and ended. ``runner`` is what ``make`` has given."""

    def plan(self) -> Future[SparePlan] | None:
        """Asks the engine's runner what spares may be beside it; None while there is none."""
        ...

    def make(self, name: str) -> Any | None:
        """Starts a process of this name; None if another has it still, or none may be started."""
        ...

    def warm(self, runner: Any, plan: SparePlan) -> Future[None]: ...

    def ping(self, runner: Any) -> Future[RunnerState]: ...

    def end(self, runner: Any, process: Process | None) -> None: ...


@dataclass(slots=True, eq=False)
class Spare:
    """A process that may take over."""

    name: str
    runner: Any
    started: float  # time
    warmed: Future[None]
    ping: Future[RunnerState]
    pinged: float  # time
    process: Process | None = None  # once it has answered

    @property
    def is_ready(self) -> bool:
        """Whether it has done all ahead that it can."""
        return self.process is not None and self.warmed.done() and not self.warmed.exception()


class SpareRunners:
    """The spares of an engine of one rank. Thread-safe; a thread of its own looks after them.

    Args:
        names: of the engine's runners. The first is the runner's, and there may be as many spares
            as there are others.
        clock: returns seconds.
    """

    def __init__(
        self,
        names: Sequence[str],
        calls: SpareCalls,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.serving = names[0]  # the name of the runner, which it keeps for life
        self._names = tuple(names)
        self._calls = calls
        self._clock = clock
        self._lock = threading.Lock()
        self._spares: list[Spare] = []
        self._plan: Future[SparePlan] | None = None
        self._not_before = clock()
        self._lost = 0  # in a row, before they were ready
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the runner and its spares may have."""
        return self._names

    @property
    def num_ready(self) -> int:
        """Spares that have done all ahead that they can."""
        return sum(spare.is_ready for spare in self._listed())

    def watch(self) -> None:
        """Starts the thread that makes spares and looks after them."""
        if len(self._names) > 1:
            threading.Thread(target=self._watch, name="spares", daemon=True).start()

    def rest(self, seconds: float = SPARE_CALM_SECONDS) -> None:
        """The runner starts or recovers, or something else does: none is made for a while."""
        self._not_before = self._clock() + seconds

    def take(self) -> Spare | None:
        """The spare that takes over, with its name: a ready one, or one that will be sooner than a
        new process would. None without one."""
        with self._lock:
            usable = [spare for spare in self._spares if spare.process is not None]
            if not usable:
                return None
            taken = max(usable, key=lambda spare: spare.is_ready)
            self._spares.remove(taken)
            self.serving = taken.name
            return taken

    def turn(self) -> None:
        """Looks at each spare once, and makes one that is missing."""
        for spare in self._listed():
            if (reason := self._why_lost(spare)) is not None:
                self._drop(spare, reason)
        self._make_missing()

    def close(self) -> None:
        """Ends all spares; none is made any more."""
        self._closed = True
        for spare in self._listed():
            self._end(spare)

    def _watch(self) -> None:
        while not self._closed:
            try:
                self.turn()
            except Exception as error:  # Ray's control plane may be away
                logger.warning("spare runners are not looked after: %s", error)
            time.sleep(SPARE_TURN_SECONDS)

    def _listed(self) -> list[Spare]:
        with self._lock:
            return list(self._spares)

    def _why_lost(self, spare: Spare) -> str | None:
        """Why a spare is of no use, or None; also pings it, when it is time."""
        now = self._clock()
        if spare.warmed.done() and (failure := spare.warmed.exception()) is not None:
            return f"it cannot be prepared: {failure}"
        if spare.warmed.done():
            self._lost = 0
        elif now - spare.started > SPARE_WARM_SECONDS:
            return "its imports hang"
        if not spare.ping.done():
            patience = RUNNER_PROCESS_SECONDS if spare.process is None else PING_PATIENCE_SECONDS
            return "it does not answer" if now - spare.pinged > patience else None
        if (failure := spare.ping.exception()) is not None:
            return f"it has died: {failure}"
        spare.process = spare.ping.result().process
        if now - spare.pinged >= RUNNER_PING_SECONDS:
            spare.ping, spare.pinged = self._calls.ping(spare.runner), now
        return None

    def _drop(self, spare: Spare, reason: str) -> None:
        lines = reason.strip().splitlines()
        if self._end(spare):
            logger.warning("the spare runner %s is made again: %s", spare.name, lines[0])
            pause = SPARE_CALM_SECONDS * 2**self._lost
            self._lost += 1
            self.rest(min(pause, MAX_RESTART_PAUSE_SECONDS))

    def _end(self, spare: Spare) -> bool:
        """Ends a spare unless it has taken over; whether it had not."""
        with self._lock:
            if spare not in self._spares:
                return False
            self._spares.remove(spare)
        self._calls.end(spare.runner, spare.process)
        return True

    def _make_missing(self) -> None:
        """Asks the runner whether a spare may be, then makes one, in two turns."""
        with self._lock:
            held = {self.serving, *(spare.name for spare in self._spares)}
        free = [name for name in self._names if name not in held]
        if not free or self._closed or self._clock() < self._not_before:
            return
        if self._plan is None:
            self._plan = self._calls.plan()
        if self._plan is None or not self._plan.done():
            return
        asked, self._plan = self._plan, None
        if asked.exception() is not None:
            return
        if (plan := asked.result()).count <= len(self._names) - len(free) - 1:
            self.rest(MAX_RESTART_PAUSE_SECONDS)
            return
        if (runner := self._calls.make(free[0])) is None:
            return
        now = self._clock()
        warmed, ping = self._calls.warm(runner, plan), self._calls.ping(runner)
        with self._lock:
            self._spares.append(Spare(free[0], runner, now, warmed, ping, now))
