"""What changes for the runners with the next step: new requests, and slots to free."""

from collections.abc import Iterable

from rayfin.actors.messages import NewRequest


class RunnerDiff:
    """Collects the changes for the next step, and tracks which slots the runners know.

    A request that enters and leaves a slot between two steps is not sent, and a slot that the
    runners do not know is not freed there.
    """

    def __init__(self, *, send_history: bool = False) -> None:
        self.send_history = send_history  # with every request, not only where sampling needs it
        self._new: dict[int, NewRequest] = {}  # by handle
        self._freed: list[int] = []
        self._known: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        """Whether the slot's request was not sent to the runners yet."""
        return slot in self._new

    def enter(self, new: NewRequest) -> None:
        """Adds a request in slot ``new.handle``; it is sent with its first row."""
        self._new[new.handle] = new

    def leave(self, slot: int) -> None:
        """Frees the slot."""
        self._new.pop(slot, None)
        if slot in self._known:
            self._known.remove(slot)
            self._freed.append(slot)

    def drain(self, slots: Iterable[int]) -> tuple[list[NewRequest], list[int]]:
        """Returns the changes for a step with rows of ``slots``.

        Returns:
            The new requests among its rows, and the slots to free, which comes first.
        """
        new = [self._new.pop(slot) for slot in slots if slot in self._new] if self._new else []
        freed, self._freed = self._freed, []
        self._known.update(request.handle for request in new)
        return new, freed

    def clear(self) -> None:
        """Drops all changes: the runners are new."""
        self._new.clear()
        self._freed.clear()
        self._known.clear()
