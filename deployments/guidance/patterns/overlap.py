"""What a pattern matches, and whether two patterns share a text.

Each pattern is an automaton that reads the whole text: before and after the pattern it reads
anything, unless ``^`` or ``$`` forbids it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from rayfin.deployments.guidance.patterns.parts import Chars, Edge, OneOf, Part, Repeat, Sequence
from rayfin.deployments.guidance.patterns.ranges import ALL, Ranges, contains, count, intersects

MAX_STATES = 2_000


@dataclass(slots=True)
class Fuel:
    """The work that may be done for one document. Without fuel an answer is not known."""

    left: int = 30_000

    def spend(self, work: int) -> bool:
        """Whether there is fuel."""
        self.left -= work
        return self.left > 0


class Pattern:
    """A pattern, and its automaton once that is needed."""

    def __init__(self, part: Part, fuel: Fuel) -> None:
        self.part = part
        self._fuel = fuel
        self._made: _Automaton | None = None
        self._tried = False

    def matches(self, text: str) -> bool | None:
        """Whether the pattern is found in the text; None if that is not known."""
        automaton = self._automaton()
        if automaton is None:
            return None
        states = automaton.closed([automaton.start], at_start=True)
        for c in text:
            if not self._fuel.spend(len(states)):
                return None
            states = automaton.closed(
                target
                for state in states
                for ranges, target in automaton.steps[state]
                if contains(ranges, ord(c))
            )
        found = any(automaton.ends(state) for state in states)
        return None if found and automaton.rough else found

    def matches_only(self, texts: Iterable[str]) -> bool:
        """Whether no text but these matches; False if that is not known."""
        automaton = self._automaton()
        if automaton is None or automaton.rough:
            return False
        names = frozenset(texts)
        longer = {name[:i]: set[str]() for name in names for i in range(len(name) + 1)}
        for beginning in longer:
            if beginning:
                longer[beginning[:-1]].add(beginning[-1])
        # A state, and the beginning of a name that was read; None: of no name.
        waiting: list[tuple[int, str | None]]
        waiting = [(state, "") for state in automaton.closed([automaton.start], True)]
        seen = set(waiting)
        while waiting:
            state, read = waiting.pop()
            if automaton.ends(state) and read not in names:
                return False
            following = longer.get(read, set()) if read is not None else set()
            for ranges, target in automaton.steps[state]:
                if not self._fuel.spend(1 + len(following)):
                    return False
                known = [c for c in following if contains(ranges, ord(c))]
                reads = [f"{read}{c}" for c in known]
                others = [None] * (count(ranges) > len(known))
                for pair in product(automaton.closed([target]), [*reads, *others]):
                    if pair not in seen:
                        seen.add(pair)
                        waiting.append(pair)
        return True

    def overlaps(self, other: "Pattern") -> bool:
        """Whether a text may match both; True if that is not known."""
        a, b = self._automaton(), other._automaton()
        if a is None or b is None:
            return True
        starts = [(p, q) for p in a.closed([a.start], True) for q in b.closed([b.start], True)]
        seen = set(starts)
        waiting = list(starts)
        while waiting:
            p, q = waiting.pop()
            if a.ends(p) and b.ends(q):
                return True
            for ranges, target in a.steps[p]:
                for others, other_target in b.steps[q]:
                    if not self._fuel.spend(1):
                        return True
                    if intersects(ranges, others):
                        for pair in _pairs(a.closed([target]), b.closed([other_target])):
                            if pair not in seen:
                                seen.add(pair)
                                waiting.append(pair)
        return False

    def _automaton(self) -> "_Automaton | None":
        if not self._tried and self._fuel.left > 0:
            self._tried = True
            self._made = _Automaton.of(self.part)
            self._fuel.spend(MAX_STATES if self._made is None else len(self._made.steps))
        return self._made


def _pairs(ones: Iterable[int], others: Iterable[int]) -> Iterable[tuple[int, int]]:
    listed = list(others)
    return ((p, q) for p in ones for q in listed)


class _Automaton:
    """States with steps over characters, and moves that read nothing."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[Ranges, int]]] = []
        self.rough = False  # a set of Unicode's properties is taken for every character
        self._moves: list[list[int]] = []
        self._start_moves: dict[int, list[int]] = {}  # at the start of the text only
        self._end_moves: dict[int, list[int]] = {}  # at its end only
        self._ends: dict[int, bool] = {}
        self._closed: dict[int, frozenset[int]] = {}
        self.start = self._state()
        self._final = self.start

    @classmethod
    def of(cls, part: Part) -> "_Automaton | None":
        """The automaton of a pattern, or None if it is too large."""
        automaton = cls()
        automaton.steps[automaton.start].append((ALL, automaton.start))
        first = automaton._state()
        automaton._moves[automaton.start].append(first)
        final = automaton._add(part, first)
        if final is None:
            return None
        automaton.steps[final].append((ALL, final))
        automaton._final = final
        return automaton

    def closed(self, states: Iterable[int], at_start: bool = False) -> frozenset[int]:
        """The states, and those that are reached without reading."""
        if at_start:
            return self._reach(states, self._start_moves)
        reached: set[int] = set()
        for state in states:
            if state not in self._closed:
                self._closed[state] = self._reach([state], {})
            reached |= self._closed[state]
        return frozenset(reached)

    def ends(self, state: int) -> bool:
        """Whether the text may end here."""
        if state not in self._ends:
            self._ends[state] = self._final in self._reach([state], self._end_moves)
        return self._ends[state]

    def _reach(self, states: Iterable[int], extra: dict[int, list[int]]) -> frozenset[int]:
        reached = set(states)
        waiting = list(reached)
        while waiting:
            state = waiting.pop()
            for target in (*self._moves[state], *extra.get(state, ())):
                if target not in reached:
                    reached.add(target)
                    waiting.append(target)
        return frozenset(reached)

    def _state(self) -> int:
        self.steps.append([])
        self._moves.append([])
        return len(self.steps) - 1

    def _add(self, part: Part, at: int) -> int | None:
        """Adds a part that begins in a state; returns the state after it."""
        if len(self.steps) > MAX_STATES:
            return None
        match part:
            case Chars(ranges, properties):
                after = self._state()
                self.rough |= bool(properties)
                self.steps[at].append((ALL if properties else ranges, after))
                return after
            case Edge(at_end):
                after = self._state()
                moves = self._end_moves if at_end else self._start_moves
                moves.setdefault(at, []).append(after)
                return after
            case Sequence(parts):
                return self._add_all(parts, at)
            case OneOf(parts):
                after = self._state()
                for one in parts:
                    first = self._state()
                    self._moves[at].append(first)
                    last = self._add(one, first)
                    if last is None:
                        return None
                    self._moves[last].append(after)
                return after
            case Repeat():
                return self._add_repeat(part, at)

    def _add_all(self, parts: Iterable[Part], at: int | None) -> int | None:
        for part in parts:
            if at is None:
                return None
            at = self._add(part, at)
        return at

    def _add_repeat(self, part: Repeat, at: int) -> int | None:
        after: int | None = self._add_all([part.part] * part.least, at)
        if after is None:
            return None
        if part.most is None:
            loop = self._state()
            self._moves[after].append(loop)
            last = self._add(part.part, loop)
            if last is None:
                return None
            self._moves[last].append(loop)
            return loop
        final = self._state()
        self._moves[after].append(final)
        for _ in range(part.most - part.least):
            after = self._add(part.part, after)
            if after is None:
                return None
            self._moves[after].append(final)
        return final
