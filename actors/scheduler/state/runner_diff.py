"""What the runners must hear with the next step: first sights of requests, and slots to forget."""

from collections.abc import Iterable

from rayfin.actors.messages import NewRequest


class RunnerDiff:
    """Gathers the news of the next step, and remembers which slots the runners know.

    A slot that changes hands between two steps is told of once: who came and went unseen is left
    out, and a slot that the runners never heard of is not forgotten.
    """

    def __init__(self) -> None:
        self._new: dict[int, NewRequest] = {}  # by handle
        self._forgotten: list[int] = []
        self._known: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        """Whether nothing of the slot's request has run."""
        return slot in self._new

    def enter(self, new: NewRequest) -> None:
        """A request holds the slot ``new.handle`` from the first step on that has a row of it."""
        self._new[new.handle] = new

    def leave(self, slot: int) -> None:
        """Nobody holds the slot any more."""
        self._new.pop(slot, None)
        if slot in self._known:
            self._known.remove(slot)
            self._forgotten.append(slot)

    def drain(self, slots: Iterable[int]) -> tuple[list[NewRequest], list[int]]:
        """What the next step, which has rows of the ``slots``, is to tell.

        Returns:
            The requests that are new among its rows, and the slots to forget, which goes first.
        """
        new = [self._new.pop(slot) for slot in slots if slot in self._new] if self._new else []
        forgotten, self._forgotten = self._forgotten, []
        self._known.update(own.handle for own in new)
        return new, forgotten

    def clear(self) -> None:
        """The runners are new, and know nothing."""
        self._new.clear()
        self._forgotten.clear()
        self._known.clear()
