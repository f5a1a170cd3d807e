"""The parts of a pattern, how they are written for llguidance, and how large they are.

llguidance reads Rust's dialect, in which sets nest and know ``&&``, ``--`` and ``[:alpha:]``. So
each set is written as ranges, and each other character is escaped where it could mean more.
"""

from dataclasses import dataclass
from typing import Final

from rayfin.deployments.guidance.patterns.ranges import ALL, Ranges, complement, count

WIDE: Final = 1000  # characters; a set of more is taken for "anything"
LONG_COUNT: Final = 50


@dataclass(slots=True, frozen=True)
class Chars:
    """One character of a set."""

    ranges: Ranges
    properties: tuple[str, ...] = ()  # r"\p{L}": of Unicode, known to llguidance only
    negated: bool = False  # with properties only; else ``ranges`` is the complement


@dataclass(slots=True, frozen=True)
class Edge:
    """``^`` or ``$``: nothing, at the start or at the end of the text."""

    at_end: bool


@dataclass(slots=True, frozen=True)
class Repeat:
    """A part, ``least`` to ``most`` times; None is no limit."""

    part: "Part"
    least: int
    most: int | None


@dataclass(slots=True, frozen=True)
class Sequence:
    """Parts, one after the other."""

    parts: tuple["Part", ...]


@dataclass(slots=True, frozen=True)
class OneOf:
    """One of several parts."""

    parts: tuple["Part", ...]


Part = Chars | Edge | Repeat | Sequence | OneOf

_PLAIN = frozenset(" <>,:;=!@%'\"_")
_NAMED = {0x0A: r"\n", 0x0D: r"\r", 0x09: r"\t"}


def write(part: Part, *, edges: bool = True) -> str:
    """Returns the pattern in Rust's dialect.

    Args:
        edges: False leaves ``^`` and ``$`` out, where the whole text must match anyway.
    """
    match part:
        case Chars():
            return _write_chars(part)
        case Edge(at_end):
            return ("$" if at_end else "^") if edges else ""
        case Repeat(inner, least, most):
            text = write(inner, edges=edges)
            if not isinstance(inner, Chars):
                text = f"(?:{text})"
            return text + _write_bounds(least, most)
        case Sequence(parts):
            return "".join(
                f"(?:{write(p, edges=edges)})" if isinstance(p, OneOf) else write(p, edges=edges)
                for p in parts
            )
        case OneOf(parts):
            return "|".join(write(p, edges=edges) for p in parts)


def unrolled(part: Part) -> int:
    """Returns how many characters the pattern has when its bounds are written out."""
    match part:
        case Chars() | Edge():
            return 1
        case Repeat(inner, least, most):
            return unrolled(inner) * max(1, least if most is None else most)
        case Sequence(parts) | OneOf(parts):
            return max(1, sum(unrolled(p) for p in parts))


def is_wide(part: Part) -> bool:
    """Whether it is a set of nearly all characters."""
    return isinstance(part, Chars) and (bool(part.properties) or count(part.ranges) > WIDE)


def starts_anywhere(part: Part, whole: bool = False) -> bool:
    """Whether a match may begin after any text: no ``^``, or ``.*`` first.

    Args:
        whole: the pattern must match the whole text, as between ``^`` and ``$``.
    """
    match part:
        case OneOf(parts):
            return any(starts_anywhere(p, whole) for p in parts)
        case Sequence(parts):
            for p in parts:
                if not isinstance(p, Edge):
                    return starts_anywhere(p, whole)
                whole = whole or not p.at_end
            return not whole
        case _:
            return not whole or _runs(part)


def explodes(part: Part, whole: bool = False) -> bool:
    """Whether an automaton must remember many places where the match may have begun.

    As in ``a.{500}``: each ``a`` of the text starts a count of its own.
    """
    return starts_anywhere(part, whole) and _counts(part, False)[0]


def _counts(part: Part, after: bool) -> tuple[bool, bool]:
    """Whether a long count of any characters follows others, and whether the part has characters.

    Args:
        after: characters come before the part.
    """
    match part:
        case Edge():
            return False, after
        case Chars():
            return False, True
        case Repeat(inner, least, most):
            long = max(least, most or 0) >= LONG_COUNT and is_wide(inner)
            found = _counts(inner, after)[0]
            return (long and after) or found, True
        case OneOf(parts):
            results = [_counts(p, after) for p in parts]
            return any(found for found, _ in results), any(late for _, late in results)
        case Sequence(parts):
            found = False
            for p in parts:
                one, after = _counts(p, after)
                found = found or one
            return found, after


def _runs(part: Part) -> bool:
    """Whether it is ``.*`` or the like."""
    return isinstance(part, Repeat) and part.most is None and is_wide(part.part)


def _write_bounds(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((least, most))
    if short is not None:
        return short
    if most is None:
        return f"{{{least},}}"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def _write_chars(part: Chars) -> str:
    if part.properties:
        inside = "".join(map(_write_range, part.ranges)) + "".join(part.properties)
        return f"[^{inside}]" if part.negated else f"[{inside}]"
    ranges = part.ranges
    if ranges == ALL:
        return "(?s:.)"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _write_point(ranges[0][0])
    others = complement(ranges)
    if len(others) < len(ranges):
        return "[^" + "".join(map(_write_range, others)) + "]"
    return "[" + "".join(map(_write_range, ranges)) + "]"


def _write_range(pair: tuple[int, int]) -> str:
    low, high = pair
    if low == high:
        return _write_point(low)
    return f"{_write_point(low)}-{_write_point(high)}"


def _write_point(point: int) -> str:
    c = chr(point)
    if point in _NAMED:
        return _NAMED[point]
    if c in _PLAIN or (c.isalnum() and c.isprintable()):
        return c
    if 0x20 < point < 0x7F:
        return f"\\{c}"
    return f"\\x{{{point:x}}}"
