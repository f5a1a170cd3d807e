"""The free list."""

import pytest

from rayfin.cache.errors import CacheError
from rayfin.cache.page_pool import PagePool


def test_takes_the_page_that_is_free_for_longest() -> None:
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free(1)
    pool.free(0)
    assert pool.free_pages() == [3, 1, 0]
    assert pool.allocate(2) == [3, 1]


def test_takes_all_or_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(1)
    assert pool.allocate(3) is None
    assert pool.num_free == 2 and pool.free_pages() == [1, 2]
    assert pool.allocate(0) == []
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(1) is None


def test_double_free() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1) or []
    pool.free(page)
    with pytest.raises(CacheError, match="freed twice"):
        pool.free(page)
    with pytest.raises(CacheError):
        pool.free(1)
    assert pool.num_free == 2


def test_shared_page_is_free_when_the_last_holder_goes() -> None:
    pool = PagePool(2)
    pool.allocate(1)
    pool.share(0)
    pool.free(0)
    assert pool.num_free == 1 and pool.references[0] == 1
    pool.free(0)
    assert pool.num_free == 2


@pytest.mark.parametrize("page", [0, 2, 4])
def test_sharing_a_free_page_takes_it_out_of_the_list(page: int) -> None:
    """From the head, the middle and the tail."""
    pool = PagePool(5)
    pool.share(page)
    assert pool.free_pages() == [p for p in range(5) if p != page]
    assert pool.num_free == 4
    pool.free(page)
    assert pool.free_pages()[-1] == page


def test_needs_a_page() -> None:
    with pytest.raises(CacheError):
        PagePool(0)
