"""How much the recordings hold that are written down now: their files, then their features."""

import threading

from rayfin.actors.errors import Overloaded


class RecordingRoom:
    """Room for the recordings of all requests. Threads may share it.

    Args:
        max_bytes: of all recordings; a single one may have more.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._lock = threading.RLock()  # the collector may end a place at any time

    def check(self) -> None:
        """Raises:
        Overloaded: no recording may begin now.
        """
        if self.num_bytes >= self._max_bytes:
            raise self._full()

    def place(self) -> "RecordingPlace":
        """A place for one recording; it holds nothing yet."""
        return RecordingPlace(self)

    def take(self, place: "RecordingPlace", num_bytes: int) -> None:
        """Gives a place more, or takes it back; see ``RecordingPlace``."""
        with self._lock:
            if place.left:
                return
            others = self.num_bytes - place.num_bytes
            if num_bytes > 0 and others and self.num_bytes + num_bytes > self._max_bytes:
                raise self._full()
            self.num_bytes += num_bytes
            place.num_bytes += num_bytes

    def leave(self, place: "RecordingPlace") -> None:
        """Takes all of a place back, for good."""
        with self._lock:
            self.num_bytes -= place.num_bytes
            place.num_bytes, place.left = 0, True

    def _full(self) -> Overloaded:
        return Overloaded(
            f"Recordings of other requests hold {self.num_bytes} bytes here, of at most "
            f"{self._max_bytes}."
        )


class RecordingPlace:
    """What one recording holds of a room."""

    def __init__(self, room: RecordingRoom) -> None:
        self._room = room
        self.num_bytes = 0
        self.left = False  # a thread that goes on for a while takes nothing any more

    def take(self, num_bytes: int) -> None:
        """Holds so many bytes more; of a negative number, fewer.

        Raises:
            Overloaded: others hold too many.
        """
        self._room.take(self, num_bytes)

    def leave(self) -> None:
        """Holds nothing any more."""
        self._room.leave(self)

    def __del__(self) -> None:
        self.leave()
