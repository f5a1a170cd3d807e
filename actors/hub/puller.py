"""A thread that pulls every so often, and sooner when somebody wants numbers of now."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Puller:
    """Calls ``pull`` every ``seconds`` and at each ``refresh``, never twice at once.

    Whoever wants fresh numbers waits for a pull no longer than they say, however long it takes: it
    goes on, and serves all who ask meanwhile.
    """

    def __init__(self, pull: Callable[[], None], seconds: float) -> None:
        self._pull = pull
        self._seconds = seconds
        self._changed = threading.Condition()
        self._wanted = False
        self._begun = self._done = 0  # pulls

    def start(self) -> None:
        threading.Thread(target=self._run, name="pull", daemon=True).start()

    def refresh(self, patience: float) -> bool:
        """Waits for a pull that begins after this call, for at most ``patience`` seconds.

        Returns:
            Whether it is done.
        """
        with self._changed:
            number = self._begun + 1
            self._wanted = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= number, patience)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted, self._seconds)
                self._wanted = False
                self._begun += 1
            try:
                self._pull()
            except Exception as error:  # Ray's own, whatever it is: the registry is away
                logger.warning("cannot ask the engines: %s", error)
            with self._changed:
                self._done = self._begun
                self._changed.notify_all()
