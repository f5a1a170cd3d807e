"""Renews a client's lease on an engine from a separate thread."""

import threading
from collections.abc import Callable

from rayfin.actors.timing import LEASE_RENEWAL_SECONDS


class Renewal:
    """Calls ``renew`` every few ``seconds`` until it is closed.

    An event loop with a thousand requests to read may not turn for many seconds. If its lease ran
    out meanwhile, all its requests would be aborted and sent again, which adds to its load.

    Args:
        renew: must be quick; is not called once ``close`` has returned.
    """

    def __init__(self, renew: Callable[[], object], seconds: float = LEASE_RENEWAL_SECONDS) -> None:
        self._renew = renew
        self._seconds = seconds
        self._closed = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="renewal", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with self._lock:  # a call that is under way
            pass

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            with self._lock:
                if not self._closed.is_set():
                    self._renew()
