"""Page tables that share pages: by example, and by random histories against a model of memory."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rayfin.cache.errors import CacheError
from rayfin.cache.page_claims import TENANT_SHARE
from rayfin.cache.page_tables import PageTables
from rayfin.cache.prefix_index import HashChain, Tokens

SIZE = 4


def _tokens(values: Sequence[int]) -> Tokens:
    return np.array(values, np.int32)


def _chain(tokens: Sequence[int], size: int = SIZE, extra: Sequence[str] = ()) -> HashChain:
    chain = HashChain(size, extra)
    chain.extend(_tokens(tokens))
    return chain


def _enter(tables: PageTables, slot: int, tokens: Sequence[int]) -> list[int]:
    """What an admission and its whole prompt do; returns the pages found."""
    chain = _chain(tokens)
    hits = tables.match(chain, _tokens(tokens))
    tables.share(slot, hits)
    assert tables.published[slot] == tables.held[slot] == len(hits)
    assert tables.grow(slot, len(tokens))
    tables.publish(slot, chain, _tokens(tokens))
    return hits


TEN = list(range(10))


def test_second_request_shares_full_pages() -> None:
    tables = PageTables(2, 8, SIZE, prefix_caching=True)
    assert _enter(tables, 0, TEN) == []
    assert _enter(tables, 1, TEN) == [0, 1]
    assert tables.pages_since(1, 0) == [0, 1, 3]
    assert tables.num_held == 4 and tables.pool.references[:4] == [2, 2, 1, 1]
    assert tables.published.tolist() == [2, 2]
    tables.release(0)
    assert tables.num_held == 3
    tables.check_integrity()


def test_last_token_is_always_computed() -> None:
    tables = PageTables(2, 8, SIZE, prefix_caching=True)
    _enter(tables, 0, TEN[:8])
    for length, pages in ((1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (10, 2)):
        tokens = TEN[:length]
        assert len(tables.match(_chain(tokens), _tokens(tokens))) == pages, length


def test_nothing_is_shared_when_it_is_off() -> None:
    tables = PageTables(2, 8, SIZE)
    assert _enter(tables, 0, TEN) == _enter(tables, 1, TEN) == []
    assert tables.num_held == 6
    tables.invalidate(0)
    tables.release(0)
    tables.check_integrity()


def test_pages_are_found_while_they_are_free() -> None:
    tables = PageTables(1, 8, SIZE, prefix_caching=True)
    _enter(tables, 0, TEN)
    tables.release(0)
    assert tables.num_held == 0
    tables.check_integrity()
    assert _enter(tables, 0, TEN) == [0, 1]
    assert tables.num_held == 3


def test_useless_pages_go_first_then_the_least_recently_used() -> None:
    tables = PageTables(2, 8, SIZE, prefix_caching=True)
    _enter(tables, 0, TEN)  # pages 0, 1, and 2 that is not full
    _enter(tables, 1, [9] * 8)  # pages 3, 4
    tables.release(0)
    tables.release(1)
    assert tables.pool.free_pages() == [2, 5, 6, 7, 1, 0, 4, 3]
    assert _enter(tables, 0, TEN) == [0, 1]  # used just now
    tables.release(0)
    assert tables.pool.free_pages() == [2, 5, 6, 7, 4, 3, 1, 0]
    assert tables.grow(1, 5 * SIZE)
    assert tables.match(_chain([9] * 8), _tokens([9] * 8)) == [3]  # its tail has gone
    assert len(tables.match(_chain(TEN), _tokens(TEN))) == 2
    tables.check_integrity()


def test_eviction_never_touches_a_held_page() -> None:
    tables = PageTables(3, 4, SIZE, prefix_caching=True)
    _enter(tables, 0, TEN[:9])
    assert not tables.grow(1, 2 * SIZE)
    assert tables.grow(1, SIZE)
    assert tables.pages_since(1, 0) == [3]
    assert tables.match(_chain(TEN[:9]), _tokens(TEN[:9])) == [0, 1]
    tables.check_integrity()


def test_free_pages_that_a_request_would_adopt_do_not_count_as_room() -> None:
    tables = PageTables(2, 4, SIZE, prefix_caching=True)
    _enter(tables, 0, TEN)
    assert tables.num_free_without([0, 1]) == 1
    tables.release(0)
    assert tables.num_free_without([0, 1]) == 2
    assert tables.num_free_without([]) == 4


def test_retract_forgets_all_pages_of_the_slot() -> None:
    tables = PageTables(3, 12, SIZE, prefix_caching=True)
    _enter(tables, 0, TEN)
    _enter(tables, 1, [*TEN[:8], 7, 7, 7, 7, 7])
    _enter(tables, 2, [5] * 8)
    tables.invalidate(1)
    for tokens, found in ((TEN, 0), ([*TEN[:8], 7, 7, 7, 7, 7], 0), ([5] * 9, 2)):
        assert len(tables.match(_chain(tokens), _tokens(tokens))) == found
    tables.check_integrity()
    tables.release(1)
    tables.check_integrity()
    assert tables.pages_since(0, 0) == [0, 1, 2]  # who shares them keeps them


def test_pages_of_equal_content_are_known_once() -> None:
    """Two requests that were computed side by side; the second one's pages are useless later."""
    tables = PageTables(2, 8, SIZE, prefix_caching=True)
    tables.grow(0, 8)
    tables.grow(1, 8)
    for slot in (0, 1):
        tables.publish(slot, _chain(TEN[:8]), _tokens(TEN[:8]))
    tables.check_integrity()
    tables.release(1)
    tables.release(0)
    assert tables.pool.free_pages() == [2, 3, 4, 5, 6, 7, 1, 0]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length, shared, copies", [(0, 0, 0), (3, 0, 1), (4, 1, 0), (9, 2, 1)])
def test_fork_shares_full_pages_and_copies_the_last(
    caching: bool, length: int, shared: int, copies: int
) -> None:
    tables = PageTables(2, 8, SIZE, prefix_caching=caching)
    _enter(tables, 0, TEN)
    free = tables.pool.free_pages()
    moves = tables.fork(0, 1, length)
    own = free[:copies]
    assert moves == [(tables.pages_since(0, 0)[shared], page) for page in own]
    assert tables.pages_since(1, 0) == tables.pages_since(0, 0)[:shared] + own
    assert tables.held.tolist() == [3, shared + copies]
    tables.check_integrity()
    tables.release(0)
    assert tables.num_held == shared + copies
    tables.check_integrity()


def test_fork_without_a_free_page_changes_nothing() -> None:
    tables = PageTables(2, 3, SIZE, prefix_caching=True)
    _enter(tables, 0, TEN)
    before = list(tables.pool.references)
    assert tables.fork(0, 1, 10) is None
    assert tables.pool.references == before and tables.pages_since(1, 0) == []
    assert tables.fork(0, 1, 8) == []  # no page is needed


def test_fork_may_copy_into_a_page_that_was_known() -> None:
    tables = PageTables(3, 3, SIZE, prefix_caching=True)
    _enter(tables, 0, [7] * SIZE)
    tables.release(0)
    _enter(tables, 1, TEN[:6])  # pages 1, 2; page 0 is free, and known
    assert tables.fork(1, 2, 6) == [(2, 0)]
    assert tables.match(_chain([7] * 5), _tokens([7] * 5)) == []
    tables.check_integrity()


def test_pages_shared_by_a_fork_are_not_published_behind_the_others_back() -> None:
    tables = PageTables(2, 8, SIZE, prefix_caching=True)
    tables.grow(0, 10)  # computed, and not in the index
    assert tables.fork(0, 1, 9) is not None
    tables.publish(0, _chain(TEN), _tokens(TEN))
    tables.check_integrity()


def _know_a_page_that_is_not_full(tables: PageTables) -> None:
    assert tables.index is not None
    tables.index.add(tables.pages_since(0, 2)[0], b"?", _tokens([8, 9, 0, 0]))


def _know_too_many(tables: PageTables) -> None:
    tables.published[0] = 4


@pytest.mark.parametrize("corrupt", [_know_a_page_that_is_not_full, _know_too_many])
def test_check_integrity_finds(corrupt: Callable[[PageTables], None]) -> None:
    tables = PageTables(2, 8, SIZE, prefix_caching=True)
    _enter(tables, 0, TEN)
    tables.check_integrity()
    corrupt(tables)
    with pytest.raises(CacheError):
        tables.check_integrity()


Prefix = tuple[str, tuple[int, ...]]  # extra key, all tokens up to a page's end
PROMPTS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=30)


def test_pinned_pages_outlast_others_and_stop_nothing() -> None:
    tables = PageTables(2, 8, SIZE, prefix_caching=True)
    _enter(tables, 0, TEN)
    tables.pin(0, 10, "one", 5.0)  # its first two pages, a quarter of all
    tables.release(0)
    for number in range(1, 9):  # more than there is room for beside them
        _enter(tables, 0, [number * 100 + i for i in range(8)])
        tables.release(0)
        tables.check_integrity()
    assert _enter(tables, 0, TEN) == [0, 1]
    tables.release(0)
    assert tables.grow(0, 8 * SIZE)  # all pages: what is kept goes too
    assert len(tables.pins) == 0
    tables.release(0)
    tables.check_integrity()


def test_a_pin_ends() -> None:
    tables = PageTables(1, 8, SIZE, prefix_caching=True)
    _enter(tables, 0, TEN)
    tables.pin(0, 10, "one", 5.0)
    tables.pin(0, 10, "other", 4.0)  # shorter: nothing changes
    tables.release(0)
    tables.expire_pins(4.9)
    assert len(tables.pins) == 1 and tables.pool.kept_pages() == [1, 0]
    tables.expire_pins(5.0)
    assert len(tables.pins) == 0 and tables.pool.kept_pages() == []
    assert tables.pool.free_pages()[-2:] == [1, 0]  # the last to be reused of the others
    tables.check_integrity()


def test_a_tenants_pins_are_bounded() -> None:
    """Its oldest go, another tenant's stay."""
    tables = PageTables(3, 16, SIZE, prefix_caching=True)
    for slot, tenant in enumerate(("other", "one", "one")):
        _enter(tables, slot, [slot * 50 + i for i in range(12)])
        tables.pin(slot, 12, tenant, 5.0)
    kept = [
        page for slot in range(3) for page in tables.pages_since(slot, 0) if page in tables.claims
    ]
    assert kept == [0, 1, 2, 6, 7, 8]
    long = [900 + i for i in range(20)]
    tables.release(1)
    _enter(tables, 1, long)
    tables.pin(1, 20, "one", 5.0)  # more than it may have: the start of the prompt
    pages = tables.pages_since(1, 0)
    assert [page in tables.claims for page in pages] == [True] * 4 + [False]
    assert len(tables.claims) == 3 + 4 and len(tables.pins) == 2
    tables.check_integrity()


def test_pins_that_have_ended_are_forgotten_before_their_time() -> None:
    tables = PageTables(1, 16, SIZE, prefix_caching=True)
    _enter(tables, 0, list(range(12)))
    for turn in range(1000):
        tables.pin(0, 8, "one", 3600.0 + turn)
    assert len(tables.pins) == 1 and len(tables.pins._due) < 100
    tables.expire_pins(3600.0 + 998)
    assert len(tables.pins) == 1
    tables.expire_pins(3600.0 + 999)
    assert len(tables.pins) == 0


def test_pins_that_go_on_from_each_other_are_one() -> None:
    """As the turns of a conversation do; what another wants for longer stays."""
    tables = PageTables(1, 64, SIZE, prefix_caching=True)
    _enter(tables, 0, list(range(40)))
    tables.pin(0, 8, "one", 900.0)
    for turn in range(2, 9):
        tables.pin(0, 4 * turn, "one", 5.0)
        assert len(tables.pins) == 1 + (turn > 2) and len(tables.claims) == turn
    tables.pin(0, 12, "one", 4.0)
    assert len(tables.pins) == 2
    tables.expire_pins(6.0)
    assert len(tables.pins) == 1 and len(tables.claims) == 2
    tables.check_integrity()


def test_a_claim_goes_whole_and_after_all_else() -> None:
    """And with it no page that another claims."""
    tables = PageTables(3, 12, SIZE, prefix_caching=True)
    asked: list[str] = []

    def reclaim() -> bool:
        asked.append("b" if not asked else "a")
        tables.unclaim(asked[-1])
        return True

    tables.reclaim = reclaim
    head = list(range(4))
    for slot, name in enumerate("ab"):
        _enter(tables, slot, [*head, *[9 + slot] * 12])
        tables.claim(name, tables.pages_since(slot, 0))
    assert [tables.claims.num_alone(name) for name in "ab"] == [3, 3]
    tables.release(0)
    tables.release(1)
    assert tables.num_unclaimed == 12 - 7
    assert tables.grow(2, 5 * SIZE) and not asked
    tables.release(2)
    assert tables.grow(2, 6 * SIZE) and asked == ["b"]  # the last page would have been enough
    assert tables.claims.count("a") == tables.claims.num_alone("a") == 4
    tables.check_integrity()
    assert _enter(tables, 0, [*head, *[9] * 12]) == tables.claims.pages("a")[:3]
    tables.release(0)
    tables.release(2)
    assert tables.grow(2, 12 * SIZE) and asked == ["b", "a"] and len(tables.claims) == 0
    tables.check_integrity()


class SharedPagesMachine(RuleBasedStateMachine):
    """Requests that come, grow, end, fail and crash, in an alphabet in which many begin alike.

    The model knows the free list, what each page holds, what the index must know, and who claims
    which pages: pins until when, and names until they are needed, the first of the alphabet first.
    """

    @initialize(slots=st.integers(1, 4), num_pages=st.integers(1, 20), size=st.integers(1, 5))
    def start(self, slots: int, num_pages: int, size: int) -> None:
        self.tables = PageTables(slots, num_pages, size, prefix_caching=True)
        self.slots, self.size = slots, size
        self.free = list(range(num_pages))
        self.memory: list[list[int | None]] = [[None] * size for _ in range(num_pages)]
        self.known: dict[Prefix, int] = {}
        self.pages: list[list[int]] = [[] for _ in range(slots)]
        self.text: list[list[int]] = [[] for _ in range(slots)]
        self.salt = [""] * slots
        self.chains = [HashChain(size) for _ in range(slots)]
        self.kept: list[int] = []  # free pages with a claim
        self.pins: list[tuple[int, int, list[int]]] = []  # (end, number, pages), the oldest first
        self.claims: dict[str, list[int]] = {}
        self.tables.reclaim = self._reclaim
        self.now = self.number = 0

    @rule(slot=st.integers(0, 3), prompt=PROMPTS, salt=st.sampled_from(["", "", "", "x"]))
    def enter(self, slot: int, prompt: list[int], salt: str) -> None:
        slot %= self.slots
        if self.pages[slot]:
            return
        chain = HashChain(self.size, [salt] if salt else [])
        chain.extend(_tokens(prompt))
        hits = self.tables.match(chain, _tokens(prompt))
        assert hits == self._longest_known(salt, prompt)
        room = len([page for page in (*self.free, *self.kept) if page not in hits])
        assert self.tables.num_free_without(hits) == room
        if self.tables.pages_for(len(prompt)) - len(hits) > room:
            return
        self.tables.share(slot, hits)
        for pages in (self.free, self.kept):
            pages[:] = [page for page in pages if page not in hits]
        self.pages[slot], self.salt[slot], self.chains[slot] = list(hits), salt, chain
        self.text[slot] = prompt[: len(hits) * self.size]
        assert self._append(slot, prompt[len(hits) * self.size :])
        self._publish(slot)

    @rule(slot=st.integers(0, 3), tokens=PROMPTS, publish=st.booleans())
    def go_on(self, slot: int, tokens: list[int], publish: bool) -> None:
        slot %= self.slots
        if self.pages[slot] and self._append(slot, tokens) and publish:
            self._publish(slot)

    @rule(source=st.integers(0, 3), into=st.integers(0, 3), share=st.floats(0, 1))
    def fork(self, source: int, into: int, share: float) -> None:
        source, into = source % self.slots, into % self.slots
        if not self.pages[source] or self.pages[into]:
            return
        length = round(share * len(self.text[source]))
        full, rest = divmod(length, self.size)
        copies = self.tables.fork(source, into, length)
        assert (copies is None) == (rest > 0 and not self.free and not self.kept)
        if copies is None:
            return
        own = self._take(bool(rest))
        assert copies == [(self.pages[source][full], page) for page in own]
        for page, copy in copies:
            self.memory[copy] = list(self.memory[page])
        self.pages[into] = self.pages[source][:full] + own
        self.text[into], self.salt[into] = self.text[source][:length], self.salt[source]
        self.chains[into] = HashChain(self.size, [self.salt[into]] if self.salt[into] else [])

    @rule(slot=st.integers(0, 3), failed=st.sampled_from([False, False, False, True]))
    def leave(self, slot: int, failed: bool) -> None:
        slot %= self.slots
        if failed:
            self.tables.invalidate(slot)
            gone = set(self.pages[slot])
            self._reused(gone)
        self._release(slot)

    @rule(slot=st.integers(0, 3), tokens=st.integers(0, 30), seconds=st.integers(1, 3))
    def pin(self, slot: int, tokens: int, seconds: int) -> None:
        slot, end = slot % self.slots, self.now + seconds
        self.tables.pin(slot, tokens, "one", end)
        limit = max(1, self.tables.pool.num_pages // TENANT_SHARE)
        pages = self.pages[slot][: tokens // self.size]
        pages = [page for page in pages if page in self.known.values()][:limit]
        if any(other[0] >= end and other[2][: len(pages)] == pages for other in self.pins):
            return
        room, lost = limit - len(pages), list[int]()
        for other in reversed(list(self.pins)):
            covered = other[0] <= end and pages[: len(other[2])] == other[2]
            if other[2] and not covered and len(other[2]) <= room:
                room -= len(other[2])
                continue
            room = room if covered else 0
            self.pins.remove(other)
            lost += [page for page in other[2] if not self._is_claimed(page)]
        self.number += 1
        self.pins.append((end, self.number, pages))
        self._unkeep(lost)

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.tables.expire_pins(self.now)
        lost = []
        for pin in sorted(self.pins):
            if pin[0] <= self.now:
                self.pins.remove(pin)
                lost += [page for page in pin[2] if not self._is_claimed(page)]
        self._unkeep(lost)

    @rule(slot=st.integers(0, 3), name=st.sampled_from("abc"), share=st.floats(0, 1))
    def claim(self, slot: int, name: str, share: float) -> None:
        slot %= self.slots
        count = round(share * len(self.pages[slot]))
        pages = [page for page in self.pages[slot][:count] if page in self.known.values()]
        self.tables.claim(name, pages)
        before, self.claims[name] = self.claims.get(name, []), pages
        self._unkeep([page for page in before if not self._is_claimed(page)])

    @rule(slot=st.integers(0, 3), name=st.sampled_from("abc"))
    def claim_prefix(self, slot: int, name: str) -> None:
        """As a turn does: what is behind its claim, or another prefix instead of it."""
        hashes, before = self.chains[slot % self.slots].hashes, self.claims.get(name, [])
        assert self.tables.index is not None
        every = self.tables.index.find(hashes)
        claimed, pages = self.tables.find(name, hashes)
        assert claimed == (len(before) if every[: len(before)] == before else 0)
        assert every[:claimed] + pages == every
        if claimed:
            self.tables.extend_claim(name, pages)
        else:
            self.tables.claim(name, pages)
        self.claims[name] = every
        kept = [page for page in every if page in self.free]
        self.free[:] = [page for page in self.free if page not in kept]
        self.kept += kept
        self._unkeep([page for page in before if not self._is_claimed(page)])

    @rule(name=st.sampled_from("abc"))
    def unclaim(self, name: str) -> None:
        self.tables.unclaim(name)
        self._unclaim(name)

    @rule()
    def crash(self) -> None:
        for slot in range(self.slots):
            self._release(slot)
        order = list(self.tables.claims._claimants)
        self.tables.reset_prefix_cache()
        self.pins.clear()
        self.claims.clear()
        self._unkeep(order)
        self.known.clear()
        self.memory = [[None] * self.size for _ in self.memory]

    def _longest_known(self, salt: str, prompt: list[int]) -> list[int]:
        pages: list[int] = []
        for end in range(self.size, len(prompt), self.size):
            page = self.known.get((salt, tuple(prompt[:end])))
            if page is None:
                break
            pages.append(page)
        return pages

    def _append(self, slot: int, tokens: list[int]) -> bool:
        after = len(self.text[slot]) + len(tokens)
        missing = -(-after // self.size) - len(self.pages[slot])
        fits = missing <= len(self.free) + len(self.kept)
        assert self.tables.grow(slot, after) == fits
        if not fits:
            return False
        taken = self._take(missing)
        self.pages[slot] += taken
        for position, token in enumerate(tokens, start=len(self.text[slot])):
            page = self.pages[slot][position // self.size]
            holders = sum(page in pages for pages in self.pages)
            assert holders == 1, "I4: a shared page is written"
            self.memory[page][position % self.size] = token
        self.text[slot] += tokens
        return True

    def _publish(self, slot: int) -> None:
        text = self.text[slot]
        self.chains[slot].extend(_tokens(text))
        start = int(self.tables.published[slot])
        self.tables.publish(slot, self.chains[slot], _tokens(text))
        for number in range(start, len(text) // self.size):
            prefix = (self.salt[slot], tuple(text[: (number + 1) * self.size]))
            self.known.setdefault(prefix, self.pages[slot][number])

    def _release(self, slot: int) -> None:
        self.tables.release(slot)
        pages, self.pages[slot], self.text[slot] = self.pages[slot], [], []
        for page in reversed(pages):
            if any(page in others for others in self.pages):
                continue
            if self._is_claimed(page):
                self.kept.append(page)
            else:
                self.free.insert(len(self.free) if page in self.known.values() else 0, page)

    def _is_claimed(self, page: int) -> bool:
        every = [*(pin[2] for pin in self.pins), *self.claims.values()]
        return any(page in pages for pages in every)

    def _unkeep(self, pages: list[int]) -> None:
        for page in reversed(pages):
            if page in self.kept and not self._is_claimed(page):
                self.kept.remove(page)
                self.free.append(page)

    def _reclaim(self) -> bool:
        """What ``PageTables`` calls: the first name of the alphabet gives up its claim."""
        names = sorted(name for name in self.tables.claims.claimants if isinstance(name, str))
        if names:
            self.tables.unclaim(names[0])
        return bool(names)

    def _take(self, count: int) -> list[int]:
        """The next pages of the free list, as many claims as that takes being given up."""
        while len(self.free) < count and self.pins:
            pin = min(self.pins)
            self.pins.remove(pin)
            self._unkeep(pin[2])
        while len(self.free) < count:
            self._unclaim(min(name for name in self.claims if self.claims[name]))
        taken, self.free[:count] = self.free[:count], []
        self._reused(taken)
        return taken

    def _unclaim(self, name: str) -> None:
        self._unkeep(self.claims.pop(name, []))

    def _reused(self, pages: Iterable[int]) -> None:
        """The pages have no known content any more."""
        gone = set(pages)
        self.known = {prefix: page for prefix, page in self.known.items() if page not in gone}
        for its in (*(pin[2] for pin in self.pins), *self.claims.values()):
            its[:] = [page for page in its if page not in gone]

    @invariant()
    def pages_add_up(self) -> None:
        """I1, I2, and I6 with the order: the free list is the model's, so evictions are too."""
        self.tables.check_integrity()
        assert self.tables.pool.free_pages()[: len(self.free)] == self.free
        assert set(self.tables.pool.kept_pages()) == set(self.kept)
        for name, pages in self.claims.items():
            assert self.tables.claims.pages(name) == pages
        assert [self.tables.pages_since(slot, 0) for slot in range(self.slots)] == self.pages
        for page, references in enumerate(self.tables.pool.references):
            assert references == sum(page in pages for pages in self.pages)

    @invariant()
    def known_pages_hold_what_is_known(self) -> None:
        """I5: only full pages, and each holds the tokens it is known for."""
        assert self.tables.index is not None
        assert len(self.tables.index) == len(self.known)
        for (_, prefix), page in self.known.items():
            assert page in self.tables.index
            assert tuple(self.memory[page]) == prefix[-self.size :]

    @invariant()
    def shared_pages_are_equal_up_to_their_end(self) -> None:
        """I3."""
        owner: dict[int, Prefix] = {}
        for slot, pages in enumerate(self.pages):
            for number, page in enumerate(pages):
                prefix = (self.salt[slot], tuple(self.text[slot][: (number + 1) * self.size]))
                assert owner.setdefault(page, prefix) == prefix
                assert list(prefix[1][number * self.size :]) == [
                    token for token in self.memory[page][: len(prefix[1]) - number * self.size]
                ]

    def teardown(self) -> None:
        """When all is let go nothing is held, and what was known is still found."""
        if not hasattr(self, "tables"):
            return
        for slot in range(self.slots):
            self._release(slot)
        assert self.tables.num_held == 0
        self.tables.check_integrity()
        for salt, prefix in self.known:
            tokens = [*prefix, 7]
            chain = _chain(tokens, self.size, [salt] if salt else [])
            found = self.tables.match(chain, _tokens(tokens))
            assert found == self._longest_known(salt, tokens)


SharedPagesMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_random_histories = SharedPagesMachine.TestCase
