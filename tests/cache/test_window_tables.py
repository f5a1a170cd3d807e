"""Tables of layers with windows: what a token may read is there, and nothing is leaked."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rayfin.cache.errors import CacheError
from rayfin.cache.kv_tensors import KVLayout, group_layers
from rayfin.cache.prefix_index import HashChain
from rayfin.cache.window_tables import GONE, WindowGroups, WindowTables

SLOTS, PAGES = 4, 60


def _tables(
    window: int, beside: int, page_size: int = 4, chunk: int = 8, num_pages: int = PAGES
) -> WindowTables:
    groups = WindowGroups(window, beside).with_reach(chunk, page_size)
    return WindowTables(SLOTS, num_pages, page_size, groups, prefix_caching=True)


def _publish(tables: WindowTables, slot: int, tokens: list[int]) -> HashChain:
    chain = HashChain(tables.page_size)
    array = np.array(tokens, np.int32)
    chain.extend(array)
    tables.publish(slot, chain, array)
    return chain


def test_entries_behind_the_window_are_freed() -> None:
    tables = _tables(window=6, beside=2)
    assert tables.reserve(0, 40)
    assert tables.held[0] == 5 and tables.num_held == 10 + 2 * 5
    tables.slide(0, 17)  # sees 12 ..: entries 0 to 2 are behind
    assert tables.num_held == 10 + 2 * 2
    assert tables.reserve(0, 40) and tables.held[0] == 8 and tables.num_held == 10 + 2 * 5
    tables.slide(0, 3)  # no way back
    tables.check_integrity()
    tables.release(0)
    assert tables.num_held == 0
    tables.check_integrity()


def test_where_all_layers_have_windows_an_entry_is_gone() -> None:
    tables = _tables(window=6, beside=0)
    assert tables.reserve(0, 400) and tables.num_held == 5
    tables.slide(0, 17)
    assert tables.entries_since(0, 0)[:3] == [0, 0, 0] and tables.num_held == 2
    assert tables.reserve(0, 400) and tables.held[0] == 8 and tables.num_held == 5
    tables.check_integrity()


@pytest.mark.parametrize("beside", [0, 1, 3])
def test_a_prefix_takes_the_last_window_only(beside: int) -> None:
    tables, tokens = _tables(window=6, beside=beside), list(range(33))
    assert tables.grow(0, 33)
    chain = _publish(tables, 0, tokens)
    tables.slide(0, 32)
    free = tables.pool.num_free
    pages = tables.match(chain, np.array([*tokens, 1], np.int32))
    assert len(pages) == 8
    tables.share(1, pages)
    assert tables.pool.num_free == free  # slot 0 holds the same
    assert tables.held[1] == 8
    tables.check_integrity()
    if not beside:
        assert pages[:6] == [GONE] * 6


@pytest.mark.parametrize("beside", [0, 1, 3])
def test_a_shorter_prefix_where_pages_of_the_window_were_taken(beside: int) -> None:
    """Pages that were free for longest go first: those of the first windows."""
    tables, tokens = _tables(window=6, beside=beside), list(range(33))
    assert tables.grow(0, 33)
    chain = _publish(tables, 0, tokens)
    for position in range(33):
        tables.slide(0, position)
    wanted = np.array(tokens[:17], np.int32)
    assert len(tables.match(chain, wanted)) == 4
    tables.pool.allocate(0)
    taken = tables._allocate(tables.pool.num_free)  # all that is free
    assert taken is not None
    assert tables.match(chain, wanted) == []
    assert len(tables.match(chain, np.array([*tokens, 1], np.int32))) == 8  # slot 0 holds those
    for page in taken:
        tables.pool.free(page)
    tables.check_integrity()


def test_a_page_without_those_beside_it_gives_way() -> None:
    tables, tokens = _tables(window=6, beside=1), list(range(17))
    assert tables.grow(0, 17)
    chain = _publish(tables, 0, tokens)
    tables.slide(0, 32)
    lost = tables._allocate(tables.pool.num_free)
    assert lost is not None
    for page in lost:
        tables.pool.free(page)
    longer = np.array(tokens, np.int32)
    assert tables.match(chain, longer) == []
    assert tables.grow(1, 17)
    _publish(tables, 1, tokens)
    assert tables.match(chain, longer) == tables.pages_since(1, 0)[:4]
    tables.check_integrity()


@pytest.mark.parametrize("beside", [0, 2])
def test_pins_keep_the_pages_of_the_window(beside: int) -> None:
    tables, tokens = _tables(window=6, beside=beside), list(range(17))
    assert tables.grow(0, 17)
    chain = _publish(tables, 0, tokens)
    tables.slide(0, 16)
    tables.pin(0, 16, "a", until=1.0)
    tables.release(0)
    taken = tables._allocate(tables.num_unclaimed)
    assert taken is not None
    assert len(tables.match(chain, np.array(tokens, np.int32))) == 4
    assert tables._allocate(tables.pool.num_free) is not None
    assert tables.match(chain, np.array(tokens, np.int32)) == []
    assert not len(tables.claims)


def test_fork_copies_a_page_of_each_group() -> None:
    tables = _tables(window=6, beside=2)
    assert tables.grow(0, 18)
    tables.slide(0, 16)
    copies = tables.fork(0, 1, 18)
    assert copies is not None and len(copies) == 3
    assert [page for page, _ in copies] == tables.entries_since(0, 4)
    assert [copy for _, copy in copies] == tables.entries_since(1, 4)
    assert tables.prefix_of(0, 2) is None  # some that its next token sees are free
    tables.check_integrity()


def _lose_one_beside(tables: WindowTables) -> None:
    tables._beside[tables.pages_since(0, 0)[-1]].pop()


def _slide_without_freeing(tables: WindowTables) -> None:
    tables._first[0] += 1


@pytest.mark.parametrize("corrupt", [_lose_one_beside, _slide_without_freeing])
def test_integrity(corrupt: Callable[[WindowTables], None]) -> None:
    tables = _tables(window=6, beside=2)
    assert tables.grow(0, 18)
    tables.check_integrity()
    corrupt(tables)
    with pytest.raises(CacheError):
        tables.check_integrity()


@pytest.mark.parametrize(
    "windows, group, place",
    [
        ([None, None], None, None),
        ([8, 8, 6], (0, 0, 0), (0, 1, 2)),
        ([8, None, 8, None], (1, 0, 1, 0), (0, 0, 1, 1)),
        ([8, 8, None, 8], (1, 2, 0, 3), (0, 0, 0, 0)),
        ([None, None, None, None, 8], None, None),  # a page of so few layers would be half empty
    ],
)
def test_groups_of_layers(windows: list[int | None], group: Any, place: Any) -> None:
    groups = group_layers([KVLayout(2, 8, 8, window) for window in windows])
    assert (groups and groups.group, groups and groups.place) == (group, place)


def test_layers_of_other_sizes_are_not_grouped() -> None:
    assert group_layers([KVLayout(2, 8, 8), KVLayout(2, 16, 16, 8)]) is None


def test_cost_of_a_request() -> None:
    groups = WindowGroups(512, 5).with_reach(256, 16)
    assert groups.reach == 49 and groups.pages(10) == 60 and groups.pages(1000) == 1245
    assert groups.most_entries(1245) == 1000 and groups.most_entries(60) == 10
    alone = WindowGroups(512, 0).with_reach(256, 16)
    assert alone.pages(1000) == 49 and alone.most_entries(49) is None
    assert alone.most_entries(48) == 48


class _Request:
    def __init__(self, tokens: list[int], page_size: int) -> None:
        self.tokens, self.computed = tokens, 0
        self.chain = HashChain(page_size)
        self.entries: list[list[int]] = []  # a runner's table: the pages of each group
        self.mixed = False


class Machine(RuleBasedStateMachine):
    """Histories of requests, with a memory that says what each page holds of which group."""

    @initialize(
        window=st.sampled_from([1, 3, 8, 13]),
        beside=st.sampled_from([0, 1, 2]),
        page_size=st.sampled_from([1, 2, 4]),
        pages=st.integers(30, 70),
    )
    def start(self, window: int, beside: int, page_size: int, pages: int) -> None:
        self.chunk = 6
        self.tables = _tables(window, beside, page_size, self.chunk, pages)
        self.width, self.window = 1 + beside, window
        self.requests: dict[int, _Request] = {}
        self.memory: dict[tuple[int, int], Any] = {}  # (page, offset) -> group, tokens up to there

    def _send(self, slot: int) -> None:
        request = self.requests[slot]
        ids = self.tables.entries_since(slot, len(request.entries))
        rows = [ids[start : start + self.width] for start in range(0, len(ids), self.width)]
        request.entries += rows

    def _write(self, slot: int, end: int) -> None:
        self._send(slot)
        request, size = self.requests[slot], self.tables.page_size
        for position in range(request.computed, end):
            for group, page in enumerate(request.entries[position // size]):
                content = group, tuple(request.tokens[: position + 1])
                self.memory[page, position % size] = content
        request.computed = end

    def _leave(self, slot: int) -> None:
        request = self.requests.pop(slot)
        self._share(slot, request)
        self.tables.release(slot)

    def _share(self, slot: int, request: _Request) -> None:
        tokens = np.array(request.tokens[: request.computed], np.int32)
        request.chain.extend(tokens)
        self.tables.publish(slot, request.chain, tokens)

    @rule(length=st.integers(1, 40), seed=st.integers(0, 2))
    def admit(self, length: int, seed: int) -> None:
        slot = next((slot for slot in range(SLOTS) if slot not in self.requests), None)
        if slot is None:
            return
        request = _Request([(seed * i) % 3 for i in range(length)], self.tables.page_size)
        tokens = np.array(request.tokens, np.int32)
        request.chain.extend(tokens)
        pages = self.tables.match(request.chain, tokens)
        if not self.tables.fits(length + 1, pages, 0, 0):
            return
        self.requests[slot] = request
        self.tables.share(slot, pages)
        request.computed = len(pages) * self.tables.page_size
        assert self.tables.reserve(slot, length), "it fitted"

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(1, 6))
    def compute(self, slot: int, count: int) -> None:
        if (request := self.requests.get(slot)) is None:
            return
        left = len(request.tokens) - request.computed
        if left:
            self.tables.slide(slot, request.computed)
            while not self.tables.reserve(slot, len(request.tokens)):
                self._leave(max(self.requests))  # preempts
                if slot not in self.requests:
                    return
            self._write(slot, request.computed + min(count, left))
        else:
            self._decode(slot, count)
        if slot in self.requests:
            self._share(slot, request)

    def _decode(self, slot: int, count: int) -> None:
        """``count`` drafts beside a token, which are taken back."""
        request = self.requests[slot]
        self.tables.slide(slot, request.computed)
        end = request.computed + 1 + count
        if self.tables.grow(slot, end):
            request.tokens += [count % 3] * (1 + count)
            sure = request.computed + 1
            self._write(slot, end)
            request.computed = sure
            del request.tokens[sure:]
            return
        full = request.computed == self.tables.held[slot] * self.tables.page_size
        if full and not self.tables.append_pages(np.array([slot])):
            self._leave(slot)
            return
        request.tokens.append(1)
        self._write(slot, request.computed + 1)

    @rule(slot=st.integers(0, SLOTS - 1))
    def fork(self, slot: int) -> None:
        target = next((other for other in range(SLOTS) if other not in self.requests), None)
        parent = self.requests.get(slot)
        if parent is None or target is None or not parent.computed:
            return
        size = self.tables.page_size
        self._send(slot)
        if (copies := self.tables.fork(slot, target, parent.computed)) is None:
            return
        for source, copy in copies:
            for offset in range(size):
                self.memory[copy, offset] = self.memory.get((source, offset))
        child = _Request(parent.tokens[: parent.computed], size)
        child.computed = parent.computed
        self.requests[target] = child

    @rule(slot=st.integers(0, SLOTS - 1))
    def leave(self, slot: int) -> None:
        if slot in self.requests:
            self._leave(slot)

    @rule(slot=st.integers(0, SLOTS - 1), tokens=st.integers(1, 40), seconds=st.integers(1, 5))
    def pin(self, slot: int, tokens: int, seconds: int) -> None:
        if (request := self.requests.get(slot)) is not None:
            self.tables.pin(slot, min(tokens, request.computed), "a", float(seconds))

    @rule(now=st.integers(0, 5))
    def expire(self, now: int) -> None:
        self.tables.expire_pins(float(now))

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "tables"):
            self.tables.check_integrity()

    @invariant()
    def what_the_next_token_sees_is_there(self) -> None:
        for slot, request in getattr(self, "requests", {}).items():
            self._send(slot)
            size = self.tables.page_size
            for position in range(request.computed):
                behind = position <= request.computed - self.window
                for group, page in enumerate(request.entries[position // size]):
                    if behind and (group or self.width == 1):
                        continue
                    expected = group, tuple(request.tokens[: position + 1])
                    assert self.memory[page, position % size] == expected

    def teardown(self) -> None:
        if hasattr(self, "tables"):
            for slot in list(self.requests):
                self._leave(slot)
            assert self.tables.num_held == 0
            self.tables.check_integrity()


TestMachine = Machine.TestCase
