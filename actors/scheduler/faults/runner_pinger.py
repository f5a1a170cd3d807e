"""Keeps idle runners alive, and detects their death before a request does."""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from rayfin.actors.timing import PING_PATIENCE_SECONDS, RUNNER_PING_SECONDS


class Pinged(Protocol):
    """The part of a runner group that the pinger uses."""

    epoch: int
    waits: bool  # for a call that may take long, such as a load, behind which pings queue

    def ping(self) -> Any | None: ...

    def alive(self, ping: Any) -> bool | None:
        """Whether the ``ping`` was answered, or None if it is pending."""
        ...


class Working(Protocol):
    """The part of an engine that the pinger uses."""

    @property
    def has_work(self) -> bool: ...


class RunnerPinger:
    """Pings the runners from a thread; runners exit without steps and pings.

    Calls ``on_death`` with the reason if they die or do not answer while the engine is idle. While
    it works, its steps detect that.
    """

    def __init__(self, group: Pinged, engine: Working, on_death: Callable[[str], None]) -> None:
        self._group = group
        self._engine = engine
        self._on_death = on_death

    def watch(self) -> None:
        threading.Thread(target=self._watch, name="keeper", daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.ping_once()
            time.sleep(RUNNER_PING_SECONDS)

    def ping_once(self) -> None:
        """Sends one ping, and waits until it is answered or has failed."""
        epoch, ping = self._group.epoch, self._group.ping()
        idle_since = time.monotonic()
        while ping is not None and epoch == self._group.epoch:
            alive = self._group.alive(ping)
            if alive:
                return
            if self._engine.has_work or self._group.waits:
                idle_since = time.monotonic()
            elif alive is False or time.monotonic() - idle_since > PING_PATIENCE_SECONDS:
                self._on_death(f"the idle runner {'has died' if alive is False else 'hangs'}")
                time.sleep(RUNNER_PING_SECONDS)
                return
            time.sleep(RUNNER_PING_SECONDS / 4)
