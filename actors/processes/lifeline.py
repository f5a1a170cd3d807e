"""What ends an actor that nobody wants any more: detached actors outlive whoever started them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rayfin.actors.timing import LIFELINE_POLL_SECONDS


class Lifeline:
    """Calls ``on_cut`` once, when nobody was heard of for ``seconds``. Time at work does not count.

    Thread-safe. ``clock`` tells seconds; a process that was stopped finds on waking that its time
    has passed meanwhile.
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
        """Seconds since somebody was heard of; 0 at work."""
        return 0.0 if self._at_work else self._clock() - self._heard

    def heard(self) -> None:
        """Somebody wants this actor."""
        self._heard = self._clock()

    @contextmanager
    def work(self) -> Iterator[None]:
        """A call that may take as long as it likes."""
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
        """Looks after it in a thread of its own."""
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _watch(self) -> None:
        while not self.is_cut():
            time.sleep(LIFELINE_POLL_SECONDS)
        self._on_cut()
