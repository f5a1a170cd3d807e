"""What the runners must hear with the next step: first sights of requests, and slots to forget."""

from rayfin.actors.messages import NewRequest


class News:
    """Gathers the news of the next step, and remembers which slots the runners know.

    A slot that changes hands between two steps is told of once: who came and went unseen is left
    out, and a slot that the runners never heard of is not forgotten.
    """

    def __init__(self) -> None:
        self._new: dict[int, NewRequest] = {}  # by handle
        self._forgotten: list[int] = []
        self._known: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        """Whether the slot's request is new in the next step: nothing of it has run."""
        return slot in self._new

    def enter(self, new: NewRequest) -> None:
        """A request holds the slot ``new.handle`` from the next step on."""
        self._new[new.handle] = new

    def leave(self, slot: int) -> None:
        """Nobody holds the slot any more."""
        self._new.pop(slot, None)
        if slot in self._known:
            self._known.remove(slot)
            self._forgotten.append(slot)

    def take(self) -> tuple[list[NewRequest], list[int]]:
        """(new requests, slots to forget, which goes first): the next step has them."""
        news = list(self._new.values()), self._forgotten
        self._known |= self._new.keys()
        self._new, self._forgotten = {}, []
        return news

    def clear(self) -> None:
        """The runners are new, and know nothing."""
        self._new.clear()
        self._forgotten.clear()
        self._known.clear()
