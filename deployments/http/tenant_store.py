"""A bounded store of items that belong to tenants."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Held(Protocol):
    """An item of a store."""

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def done(self) -> bool:
        """Whether it may be dropped; an item that still grows may not."""
        ...

    def size(self) -> int:
        """Bytes of memory, approximately."""
        ...


T = TypeVar("T", bound=Held)


class TenantStore(Generic[T]):
    """Items by id, visible to their tenant only, bounded in number, bytes and age.

    Over a bound, the oldest finished item of the tenant with the most bytes is dropped, so that no
    tenant can drive out another.
    """

    def __init__(
        self,
        max_items: int,
        max_bytes: int,
        max_age: float,
        clock: Callable[[], float] = time.monotonic,
        dropped: Callable[[str], None] = lambda item_id: None,
    ) -> None:
        self.max_bytes = max_bytes
        self._dropped = dropped  # gets the ids of what bounds have removed
        self._max_items = max_items
        self._max_age = max_age  # seconds
        self._clock = clock
        self._items: dict[str, T] = {}  # oldest first
        self._sizes: dict[str, int] = {}
        self._births: dict[str, float] = {}
        self._bytes: dict[str, int] = {}  # of each tenant

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def add(self, item: T) -> bool:
        """Adds an item; False if the store is full of items that still grow."""
        self._drop_old()
        size = item.size()
        self._make_room(1, size)
        if len(self._items) >= self._max_items:
            return False
        self._items[item.id] = item
        self._births[item.id] = self._clock()
        self._sizes[item.id] = 0
        self._resize(item, size)
        return True

    def get(self, item_id: str, tenant: str) -> T | None:
        """The tenant's item of that id, or None; items of other tenants are not found."""
        self._drop_old()
        item = self._items.get(item_id)
        return item if item is not None and item.tenant == tenant else None

    def settle(self, item: T) -> None:
        """Measures an item again after it has changed."""
        if item.id in self._items:
            self._resize(item, item.size())
            self._make_room(0, 0)

    def __iter__(self) -> Iterator[T]:
        """Iterates over all items, the oldest first."""
        return iter(list(self._items.values()))

    def find(self, item_id: str) -> T | None:
        """Returns the item of that id, of any tenant."""
        return self._items.get(item_id)

    def remove(self, item: T) -> None:
        if self._items.get(item.id) is item:
            del self._items[item.id]
            self._resize(item, 0)
            del self._sizes[item.id], self._births[item.id]

    def _resize(self, item: T, size: int) -> None:
        held = self._bytes.get(item.tenant, 0) + size - self._sizes[item.id]
        self._sizes[item.id] = size
        self._bytes[item.tenant] = held
        if not held:
            del self._bytes[item.tenant]

    def _drop_old(self) -> None:
        limit = self._clock() - self._max_age
        old = itertools.takewhile(lambda pair: pair[1] <= limit, self._births.items())
        for item in [self._items[item_id] for item_id, _ in old]:
            if item.done:
                self._drop(item)

    def _drop(self, item: T) -> None:
        self.remove(item)
        self._dropped(item.id)

    def _make_room(self, more: int, size: int) -> None:
        done = self._done_by_weight()
        while len(self._items) + more > self._max_items or self.num_bytes + size > self.max_bytes:
            victim = next(done, None)
            if victim is None:
                return
            self._drop(victim)

    def _done_by_weight(self) -> Iterator[T]:
        """Items that may be dropped, in the order in which they go."""
        while self._items:
            for tenant in sorted(self._bytes, key=self._bytes.__getitem__, reverse=True):
                owned = (item for item in self._items.values() if item.tenant == tenant)
                oldest = next((item for item in owned if item.done), None)
                if oldest is not None:
                    yield oldest
                    break
            else:
                return
