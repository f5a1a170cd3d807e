"""Leases of detached actors: they outlive their creators, and exit without a renewal."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rayfin.actors.timing import LIFELINE_POLL_SECONDS


class Lifeline:
    """Calls ``on_cut`` once, ``seconds`` after the last renewal. Time at work does not count.

    Thread-safe. ``clock`` returns seconds; it also advances while the process is stopped, so a
    process that a signal stopped for longer exits when it continues.
    """

    def __init__(
        self,
        seconds: float,
        on_cut: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._on_cut = on_cut
        self._clock = clock
        self._heard = clock()
        self._at_work = 0
        self._lock = threading.Lock()

    @property
    def silence(self) -> float:
        """Seconds since the last renewal; 0 at work."""
        return 0.0 if self._at_work else self._clock() - self._heard

    def heard(self) -> None:
        """Renews the lease."""
        self._heard = self._clock()

    @contextmanager
    def work(self) -> Iterator[None]:
        """A call of any length, during which the lease cannot run out."""
        with self._lock:
            self._at_work += 1
        try:
            yield
        finally:
            self.heard()
            with self._lock:
                self._at_work -= 1

    def is_cut(self) -> bool:
        return self.silence > self.seconds

    def watch(self) -> None:
        """Starts the thread that calls ``on_cut``."""
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _watch(self) -> None:
        while not self.is_cut():
            time.sleep(LIFELINE_POLL_SECONDS)
        self._on_cut()
