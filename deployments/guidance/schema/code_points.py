"""Sets of characters as sorted ranges of code points that do not touch."""

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
ALL: Ranges = ((0, 0xD7FF), (0xE000, LAST))
"""Every character: surrogates are none."""


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Sorts and joins ranges; surrogates go."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(pairs)):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return tuple(joined)


def complement(ranges: Ranges) -> Ranges:
    """Every character that is in none of them."""
    left: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if low > start:
            left.append((start, low - 1))
        start = high + 1
    if start <= LAST:
        left.append((start, LAST))
    return ranges_of(left)


def intersects(one: Ranges, other: Ranges) -> bool:
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][1] < other[j][0]:
            i += 1
        elif other[j][1] < one[i][0]:
            j += 1
        else:
            return True
    return False


def contains(ranges: Ranges, point: int) -> bool:
    return any(low <= point <= high for low, high in ranges)


def count(ranges: Ranges) -> int:
    return sum(high - low + 1 for low, high in ranges)


def of_text(text: str) -> Ranges:
    return ranges_of((ord(c), ord(c)) for c in text)


def _without_surrogates(pairs: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    for low, high in pairs:
        if low < 0xD800:
            yield low, min(high, 0xD7FF)
        if high > 0xDFFF:
            yield max(low, 0xE000), high


DIGIT = ranges_of([(0x30, 0x39)])
WORD = ranges_of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACES = of_text("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff")
SPACE = ranges_of([*_SPACES, (0x2000, 0x200A)])
LINE_END = of_text("\n\r\u2028\u2029")
