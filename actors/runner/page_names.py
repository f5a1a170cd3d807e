"""What the pages of a runner hold, by their names, beside the pages; and its saved states.

A scheduler that takes the runner over fills its prefix index from here, and computes nothing again.
"""

import threading
from collections import deque

import numpy as np

from rayfin.actors.messages import (
    COPY,
    STATE_SAVE,
    SWAP_IN,
    SWAP_OUT,
    Int32Array,
    Int64Array,
    SchedulerInfo,
    StepResult,
)
from rayfin.cache.prefix_index import NameChanges, PageName


class PageNames:
    """A ``StepObserver`` that knows a page's name only while the page holds what the name says.

    A page loses its name before a step moves or writes something to it, and gets one after the
    step that brings it. A step with a row that failed gives none, and neither do those that its
    scheduler had sent before it learned of it. Other threads may ask for names meanwhile.
    """

    in_turn = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[int, PageName] = {}  # by page, in the order in which they came
        self._pages: dict[bytes, tuple[int, PageName]] = {}  # by hash
        self._host: dict[int, PageName] = {}  # by page of host memory ...
        self._in_host: dict[bytes, tuple[int, PageName]] = {}  # ... and by hash
        self._states: dict[bytes, tuple[int]] = {}  # snapshot, by hash of the page that ends there
        self._coming: deque[dict[int, PageName]] = deque()  # with steps that have begun ...
        self._saving: deque[dict[int, bytes]] = deque()  # ... and states, by snapshot
        self._page_tables: Int32Array = np.zeros((0, 0), np.int32)
        self._page_size = 1
        self._ahead = 0  # steps that a scheduler sends before it has the result of one
        self._blind_until = -1  # step from which on names count again
        self._begun = (-1, -1)  # epoch and number of the last step

    def moving(self, moves: Int32Array) -> dict[int, PageName]:
        """The moves [M, 3] are about to be made: what they fill has no name any more.

        Returns:
            The names of host pages that they fill, for ``moved``.
        """
        leaving: dict[int, PageName] = {}
        with self._lock:
            for kind, source, target in moves.tolist():
                if kind in (COPY, SWAP_IN):
                    self._drop([target])
                elif kind == STATE_SAVE:
                    self._drop_states([target])
                if kind in (SWAP_IN, SWAP_OUT):  # what comes back does so once
                    host = source if kind == SWAP_IN else target
                    leaving.pop(host, None)
                    self._drop_host(host)
                if kind == SWAP_OUT and (name := self._names.get(source)) is not None:
                    leaving[target] = name
        return leaving

    def moved(self, leaving: dict[int, PageName]) -> None:
        """The moves are made, and host pages hold what ``moving`` has returned."""
        with self._lock:
            self._host |= leaving
            for page, name in leaving.items():
                self._in_host.setdefault(name.page_hash, (page, name))

    def start(self, page_tables: Int32Array, page_size: int, steps_in_flight: int) -> None:
        """Steps begin anew, over the same pages; ``page_tables`` [slots, pages] change by them."""
        with self._lock:
            self._page_tables, self._page_size = page_tables, page_size
            self._ahead, self._blind_until, self._begun = steps_in_flight, -1, (-1, -1)
            for coming in (self._states, self._coming, self._saving):
                coming.clear()

    def turn(self) -> None:
        """Steps begin anew, over pages that others shall not read."""
        with self._lock:
            for known in (self._names, self._pages, self._states, self._coming, self._saving):
                known.clear()
            self._host.clear()
            self._in_host.clear()
            self._blind_until, self._begun = -1, (-1, -1)

    def all(self) -> dict[int, PageName]:
        """Names by page, those that came first in front."""
        with self._lock:
            return dict(self._names)

    def find(self, page_hash: bytes) -> tuple[int, PageName] | None:
        """Finds a page by its hash, and its name: the same object as long as the page keeps it."""
        with self._lock:
            return self._pages.get(page_hash)

    def all_in_host(self) -> dict[int, PageName]:
        """Names by page of host memory."""
        with self._lock:
            return dict(self._host)

    def find_in_host(self, page_hash: bytes) -> tuple[int, PageName] | None:
        """Finds a page of host memory: the same object as long as it holds this."""
        with self._lock:
            return self._in_host.get(page_hash)

    def find_state(self, page_hash: bytes) -> tuple[int] | None:
        """Finds the snapshot with the state behind a page: the same object as long as it has it."""
        with self._lock:
            return self._states.get(page_hash)

    def drop_state(self, snapshot: int) -> None:
        """A snapshot is about to have another state."""
        with self._lock:
            self._drop_states([snapshot])

    def add_state(self, snapshot: int, page_hash: bytes) -> None:
        """A snapshot has got the state behind a page from elsewhere."""
        with self._lock:
            self._states[page_hash] = (snapshot,)

    def before(self, info: SchedulerInfo) -> None:
        changes = info.names
        named, dropped = ({}, []) if changes is None else (changes.named, changes.dropped)
        with self._lock:
            self._drop([*dropped, *named, *self._written(info)])
            self._coming.append(named)
            # A state that no move saves is not there.
            targets = set(info.moves[info.moves[:, 0] == STATE_SAVE, 2].tolist())
            states = (info.states or {}).items()
            self._saving.append({to: page_hash for to, page_hash in states if to in targets})
            self._begun = info.epoch, info.step

    def add(self, changes: NameChanges, after: tuple[int, int]) -> None:
        """Names pages as the next step would that follows ``after``, unless one has begun."""
        with self._lock:
            self._drop(changes.dropped)
            if self._begun == after and not self._coming and after[1] + 1 >= self._blind_until:
                self._drop([*changes.rows])
                self._know(changes.named)

    def forwarded(self, info: SchedulerInfo, rows: Int64Array, logits: object) -> None:
        pass

    def after(self, info: SchedulerInfo, result: StepResult) -> None:
        with self._lock:
            names, states = self._coming.popleft(), self._saving.popleft()
            if result.errors:
                self._blind_until = info.step + self._ahead
                self._states.clear()
            elif info.step >= self._blind_until:
                self._know(names)
                self._states |= {page_hash: (to,) for to, page_hash in states.items()}

    def overwritten(self, pages: Int32Array) -> None:
        with self._lock:
            self._drop(pages.tolist())

    def close(self) -> None:
        pass

    def _know(self, names: dict[int, PageName]) -> None:
        self._names |= names
        self._pages |= {name[0]: (page, name) for page, name in names.items()}

    def _drop(self, pages: list[int]) -> None:
        for page in pages:
            name = self._names.pop(page, None)
            # Names that come beside steps may be late, so two pages may have had one name.
            if name is not None and self._pages.get(name[0], (None,))[0] == page:
                del self._pages[name[0]]
            for coming in self._coming:
                coming.pop(page, None)

    def _drop_host(self, page: int) -> None:
        name = self._host.pop(page, None)
        if name is not None and self._in_host.get(name.page_hash, (None,))[0] == page:
            del self._in_host[name.page_hash]

    def _drop_states(self, snapshots: list[int]) -> None:
        for snapshot in snapshots:
            for page_hash in [key for key, at in self._states.items() if at == (snapshot,)]:
                del self._states[page_hash]
            for saving in self._saving:
                saving.pop(snapshot, None)

    def _written(self, info: SchedulerInfo) -> list[int]:
        """Lists pages that a step's rows may write to: the ends of their tables."""
        first = info.kv_len // self._page_size
        counts = info.kv_page_len - first
        rows = np.repeat(info.ids, counts)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        pages: list[int] = self._page_tables[rows, columns + np.repeat(first, counts)].tolist()
        return pages
