"""The ledger of pages: by example, by random histories, and with planted corruption."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from rayfin.cache.errors import CacheError
from rayfin.cache.page_tables import PageTables


def test_pages_for() -> None:
    tables = PageTables(1, 4, 16)
    assert [tables.pages_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_grow_appends() -> None:
    tables = PageTables(2, 6, 4)
    assert tables.grow(0, 5) and tables.grow(1, 1) and tables.grow(0, 8) and tables.grow(0, 9)
    assert tables.pages_since(0, 0) == [0, 1, 3]
    assert tables.pages_since(0, 2) == [3]
    assert tables.pages_since(1, 0) == [2]
    assert tables.held.tolist() == [3, 1] and tables.num_held == 4


def test_grow_never_shrinks() -> None:
    tables = PageTables(1, 6, 4)
    tables.grow(0, 12)
    assert tables.grow(0, 1)
    assert tables.held[0] == 3


def test_grow_has_no_effect_when_it_fails() -> None:
    tables = PageTables(2, 3, 4)
    tables.grow(0, 8)
    assert not tables.grow(1, 5)
    assert tables.held.tolist() == [2, 0] and tables.num_held == 2
    assert not tables.grow(0, 16)
    assert tables.pages_since(0, 0) == [0, 1]
    tables.check_integrity()


def test_release_gives_back_the_tail_first() -> None:
    """Before it, a page that was never touched comes last."""
    tables = PageTables(1, 4, 4)
    tables.grow(0, 12)
    tables.release(0)
    assert tables.pool.free_pages() == [0, 1, 2, 3]
    assert tables.num_held == 0 and tables.held[0] == 0
    tables.release(0)  # an empty table
    tables.check_integrity()


def _lose_a_page(tables: PageTables) -> None:
    tables.pool.allocate(1)


def _free_a_held_page(tables: PageTables) -> None:
    tables.pool.free(tables.pages_since(0, 0)[0])


def _hold_a_page_twice(tables: PageTables) -> None:
    tables._pages[1].append(tables.pages_since(0, 0)[0])
    tables.held[1] += 1


def _hold_a_page_twice_in_one_table(tables: PageTables) -> None:
    page = tables.pages_since(0, 0)[0]
    tables._pages[0].append(page)
    tables.pool.share(page)
    tables.held[0] += 1


def _miscount_references(tables: PageTables) -> None:
    tables.pool.share(tables.pages_since(0, 0)[0])


def _miscount_held(tables: PageTables) -> None:
    tables.held[1] = 3


def _miscount_free(tables: PageTables) -> None:
    tables.pool.num_free += 1


def _break_the_free_list(tables: PageTables) -> None:
    pages = tables.pool.free_pages()
    tables.pool._next[pages[0]] = pages[2]


def _free_list_holds_a_held_page(tables: PageTables) -> None:
    """The counts agree, the list does not."""
    held, free = tables.pages_since(0, 0)[0], tables.pool.free_pages()
    tables.pool._next[free[0]] = held
    tables.pool._next[held] = free[2]


@pytest.mark.parametrize(
    "corrupt",
    [
        _lose_a_page,
        _free_a_held_page,
        _hold_a_page_twice,
        _hold_a_page_twice_in_one_table,
        _miscount_references,
        _miscount_held,
        _miscount_free,
        _break_the_free_list,
        _free_list_holds_a_held_page,
    ],
)
def test_check_integrity_finds(corrupt: Callable[[PageTables], None]) -> None:
    tables = PageTables(2, 8, 4)
    tables.grow(0, 9)
    tables.grow(1, 4)
    tables.check_integrity()
    corrupt(tables)
    with pytest.raises(CacheError):
        tables.check_integrity()


class PageTablesMachine(RuleBasedStateMachine):
    """Random histories against a model of lists and sets.

    Besides the tables there are loose holds, as a prefix index would have: pages shared one by one.
    """

    loose = Bundle("loose")

    @initialize(slots=st.integers(1, 5), num_pages=st.integers(1, 24), page_size=st.integers(1, 17))
    def start(self, slots: int, num_pages: int, page_size: int) -> None:
        self.tables = PageTables(slots, num_pages, page_size)
        self.slots = slots
        self.tables_model: list[list[int]] = [[] for _ in range(slots)]
        self.holds: list[int] = []

    @rule(slot=st.integers(0, 4), tokens=st.integers(0, 120))
    def grow(self, slot: int, tokens: int) -> None:
        slot %= self.slots
        own = self.tables_model[slot]
        missing = -(-tokens // self.tables.page_size) - len(own)
        fits = missing <= self.tables.pool.num_free
        before = self.tables.pool.free_pages()
        assert self.tables.grow(slot, tokens) == fits
        assert self.tables.pages_since(slot, 0)[: len(own)] == own, "a table is append-only"
        if missing > 0 and fits:
            own += before[:missing]
        if not fits:
            assert self.tables.pool.free_pages() == before
        assert self.tables.pages_since(slot, 0) == own

    @rule(slot=st.integers(0, 4))
    def release(self, slot: int) -> None:
        slot %= self.slots
        self.tables.release(slot)
        self.tables_model[slot] = []

    @rule(target=loose, page=st.integers(0, 23))
    def share(self, page: int) -> int:
        page %= self.tables.pool.num_pages
        self.tables.pool.share(page)
        self.holds.append(page)
        return page

    @rule(target=loose, count=st.integers(0, 30))
    def take(self, count: int) -> Any:
        free = self.tables.pool.free_pages()
        pages = self.tables.pool.allocate(count)
        if count > len(free):
            assert pages is None
            return multiple()
        assert pages == free[:count]
        self.holds += pages
        return multiple(*pages)

    @rule(page=consumes(loose))
    def free(self, page: int) -> None:
        self.tables.pool.free(page)
        self.holds.remove(page)

    @precondition(lambda self: self.tables.pool.num_free > 0)
    @rule(index=st.integers(0, 23))
    def free_twice(self, index: int) -> None:
        free = self.tables.pool.free_pages()
        with pytest.raises(CacheError):
            self.tables.pool.free(free[index % len(free)])
        assert self.tables.pool.free_pages() == free

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        """I1 and I2: conservation; a page's references are its holders."""
        pool = self.tables.pool
        in_tables = [page for pages in self.tables_model for page in pages]
        assert len(set(in_tables)) == len(in_tables)
        free = pool.free_pages()
        assert len(free) == len(set(free)) == pool.num_free
        for page in range(pool.num_pages):
            holders = in_tables.count(page) + self.holds.count(page)
            assert pool.references[page] == holders
            assert (page in free) == (holders == 0)
        assert self.tables.num_held == pool.num_pages - len(free)
        assert self.tables.held.tolist() == [len(pages) for pages in self.tables_model]

    @invariant()
    def integrity(self) -> None:
        """The tables' own check agrees as long as only tables hold pages."""
        if self.holds:
            with pytest.raises(CacheError):
                self.tables.check_integrity()
        else:
            self.tables.check_integrity()

    def teardown(self) -> None:
        """I6: when everything is let go, nothing is held."""
        if not hasattr(self, "tables"):
            return
        for page in self.holds:
            self.tables.pool.free(page)
        for slot in range(self.slots):
            self.tables.release(slot)
        assert self.tables.num_held == 0
        self.tables.check_integrity()


PageTablesMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_random_histories = PageTablesMachine.TestCase


@pytest.mark.parametrize("sharing", [False, True])
def test_pages_of_no_use_are_used_again_before_new_ones(sharing: bool) -> None:
    """So memory that was never touched stays so, where nothing can be shared."""
    tables = PageTables(1, 64, 4, prefix_caching=sharing)
    touched = set[int]()
    for _ in range(20):
        tables.grow(0, 11)
        touched.update(tables.pages_since(0, 0))
        tables.release(0)
    assert touched == {0, 1, 2}
