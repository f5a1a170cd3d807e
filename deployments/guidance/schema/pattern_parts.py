"""The parts of a pattern, how they are written for llguidance, and how large they are.

llguidance reads Rust's dialect, in which sets nest and know ``&&``, ``--`` and ``[:alpha:]``. So
each set is written as ranges, and each other character is escaped where it could mean more.
"""

from dataclasses import dataclass

from rayfin.deployments.guidance.schema.code_points import ALL, Ranges, complement, count


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
    """A part, ``least`` to ``largest`` times; None is no limit."""

    part: "Part"
    least: int
    largest: int | None


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
        case Repeat(inner, least, largest):
            text = write(inner, edges=edges)
            if not isinstance(inner, Chars):
                text = f"(?:{text})"
            return text + _write_bounds(least, largest)
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
        case Repeat(inner, least, largest):
            return unrolled(inner) * max(1, least if largest is None else largest)
        case Sequence(parts) | OneOf(parts):
            return max(1, sum(unrolled(p) for p in parts))


def _write_bounds(least: int, largest: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((least, largest))
    if short is not None:
        return short
    if largest is None:
        return f"{{{least},}}"
    return f"{{{least}}}" if least == largest else f"{{{least},{largest}}}"


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


def texts_of(part: Part, limit: int) -> list[str] | None:
    """Returns what a pattern between ``^`` and ``$`` matches; None if that is over ``limit``."""
    if not isinstance(part, Sequence) or len(part.parts) < 2:
        return None
    first, *inner, last = part.parts
    if first != Edge(at_end=False) or last != Edge(at_end=True):
        return None
    return _texts(Sequence(tuple(inner)), limit)


def _texts(part: Part, limit: int) -> list[str] | None:
    texts: list[str] = []
    match part:
        case Chars(ranges, ()) if count(ranges) <= limit:
            texts = [chr(point) for low, high in ranges for point in range(low, high + 1)]
        case OneOf(parts):
            for one in parts:
                several = _texts(one, limit)
                if several is None:
                    return None
                texts += several
        case Sequence(parts):
            texts = [""]
            for one in parts:
                several = _texts(one, limit)
                if several is None or len(texts) * len(several) > limit:
                    return None
                texts = [before + after for before in texts for after in several]
        case Repeat(inner, least, largest) if largest is not None and largest <= limit:
            once = _texts(inner, limit)
            if once is None:
                return None
            repeated = [""]
            for times in range(largest + 1):
                texts += repeated if times >= least else []
                if len(texts) > 2 * limit or len(repeated) * len(once) > limit * limit:
                    return None
                repeated = list(dict.fromkeys(text + more for text in repeated for more in once))
            texts = list(dict.fromkeys(texts))
        case _:
            return None
    return list(dict.fromkeys(texts)) if len(texts) <= limit else None
