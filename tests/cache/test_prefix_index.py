"""Page hashes, and the pages known by them."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfin.cache.errors import CacheError
from rayfin.cache.prefix_index import HashChain, PrefixIndex, Tokens

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def _tokens(values: Sequence[int]) -> Tokens:
    return np.array(values, np.int32)


def _hashes(tokens: Sequence[int], page_size: int = 4, extra: Sequence[str] = ()) -> list[bytes]:
    chain = HashChain(page_size, extra)
    chain.extend(_tokens(tokens))
    return chain.hashes


def _filled(tokens: Sequence[int], pages: Sequence[int]) -> PrefixIndex:
    index = PrefixIndex(16, 4)
    for number, (page, page_hash) in enumerate(zip(pages, _hashes(tokens), strict=False)):
        assert index.add(page, page_hash, _tokens(tokens[4 * number : 4 * number + 4]))
    return index


def _match(index: PrefixIndex, tokens: Sequence[int], extra: Sequence[str] = ()) -> list[int]:
    return index.match(_hashes(tokens, 4, extra), _tokens(tokens))


@given(tokens=TOKENS, page_size=st.integers(1, 9), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_chain_grows_as_its_tokens_do(tokens: list[int], page_size: int, cuts: list[int]) -> None:
    chain = HashChain(page_size, ["salt"])
    for cut in [*sorted(cuts), len(tokens)]:
        chain.extend(_tokens(tokens[:cut]))
    assert chain.hashes == _hashes(tokens, page_size, ["salt"])
    assert len(chain.hashes) == len(tokens) // page_size
    chain.extend(_tokens(tokens[: len(tokens) // 2]))  # fewer: nothing is lost
    assert len(chain.hashes) == len(tokens) // page_size


def test_chain_takes_a_view_of_any_layout() -> None:
    table = np.arange(48, dtype=np.int32).reshape(12, 4)
    column = table[:, 1]
    chain = HashChain(4)
    chain.extend(column)
    assert chain.hashes == _hashes(column.tolist())
    wide = HashChain(4)
    wide.extend(column.astype(np.int64))
    assert wide.hashes == chain.hashes


@given(first=TOKENS, second=TOKENS, page_size=st.integers(1, 4))
def test_equal_hashes_mean_equal_beginnings(
    first: list[int], second: list[int], page_size: int
) -> None:
    pairs = zip(_hashes(first, page_size), _hashes(second, page_size), strict=False)
    for number, (one, other) in enumerate(pairs, start=1):
        assert (one == other) == (first[: number * page_size] == second[: number * page_size])


def test_hash_depends_on_all_before() -> None:
    """The same page after another one is another page."""
    assert _hashes([1, 2, 3, 4, 9, 9, 9, 9])[1] != _hashes([1, 2, 3, 5, 9, 9, 9, 9])[1]
    assert _hashes([9, 9, 9, 9])[0] != _hashes([1, 2, 3, 4, 9, 9, 9, 9])[1]


def test_extra_keys_are_unambiguous() -> None:
    keys = [(), ("",), ("", ""), ("ab", "c"), ("a", "bc"), ("abc",), ("c", "ab"), ("ab\0c",)]
    keys += [("ab",), ("a", "b"), ("\0\0\0\0\0\0\0\1a",), ("é",), ("e\u0301",)]
    hashes = [_hashes([1, 2, 3, 4], extra=extra)[0] for extra in keys]
    assert len(set(hashes)) == len(keys)


def test_matches_the_longest_known_prefix() -> None:
    tokens = list(range(12))
    index = _filled(tokens, [7, 3, 5])
    assert _match(index, tokens) == [7, 3, 5]
    assert _match(index, [*tokens, 99, 98, 97, 96]) == [7, 3, 5]
    assert _match(index, tokens[:11]) == [7, 3]
    assert _match(index, [*tokens[:7], 99, *tokens[8:]]) == [7]
    assert _match(index, [99, *tokens[1:]]) == []
    assert _match(index, []) == []
    assert _match(index, tokens, ["salt"]) == []


def test_a_gap_ends_the_match() -> None:
    tokens = list(range(12))
    index = _filled(tokens, [7, 3, 5])
    index.drop(3)
    assert _match(index, tokens) == [7]
    assert 5 in index  # it is there, and found again once the gap is filled
    index.add(9, _hashes(tokens)[1], _tokens(tokens[4:8]))
    assert _match(index, tokens) == [7, 9, 5]


def test_equal_hash_with_other_tokens_is_no_hit() -> None:
    """A collision, planted: somebody else's keys and values must not be read."""
    mine, theirs = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9]
    index = _filled(mine, [0])
    index.add(1, _hashes(mine)[1], _tokens(theirs[4:]))
    assert _match(index, mine) == [0]
    index.drop(0)
    index.add(2, _hashes(mine)[0], _tokens([0, 0, 0, 0]))
    assert _match(index, mine) == []


def test_first_page_wins() -> None:
    index = _filled([1, 2, 3, 4], [6])
    assert not index.add(2, _hashes([1, 2, 3, 4])[0], _tokens([1, 2, 3, 4]))
    assert 6 in index and 2 not in index and len(index) == 1
    assert _match(index, [1, 2, 3, 4]) == [6]
    index.drop(2)  # unknown: no effect
    assert _match(index, [1, 2, 3, 4]) == [6]
    index.check_integrity()


def test_drop_and_add_again() -> None:
    index = _filled([1, 2, 3, 4], [6])
    index.drop(6)
    index.drop(6)
    assert 6 not in index and len(index) == 0 and _match(index, [1, 2, 3, 4]) == []
    assert index.add(6, _hashes([5, 6, 7, 8])[0], _tokens([5, 6, 7, 8]))
    assert _match(index, [5, 6, 7, 8]) == [6] and _match(index, [1, 2, 3, 4]) == []
    index.check_integrity()


def test_clear() -> None:
    index = _filled(list(range(12)), [7, 3, 5])
    index.clear()
    assert len(index) == 0 and not any(page in index for page in range(16))
    assert _match(index, list(range(12))) == []
    index.check_integrity()
    index.clear()


def _lose_the_way_to_a_page(index: PrefixIndex) -> None:
    del index._page_of[_hashes(list(range(12)))[1]]


def _find_an_unknown_page(index: PrefixIndex) -> None:
    index._page_of[b"?"] = 1


def _swap_two_pages(index: PrefixIndex) -> None:
    first, second = _hashes(list(range(12)))[:2]
    index._page_of[first], index._page_of[second] = 3, 7


@pytest.mark.parametrize(
    "corrupt", [_lose_the_way_to_a_page, _find_an_unknown_page, _swap_two_pages]
)
def test_check_integrity_finds(corrupt: Callable[[PrefixIndex], None]) -> None:
    index = _filled(list(range(12)), [7, 3, 5])
    index.check_integrity()
    corrupt(index)
    with pytest.raises(CacheError):
        index.check_integrity()
