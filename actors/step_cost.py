"""Seconds of a step by its tokens: measured when a runner starts, or assumed; then followed.

And seconds of a prompt's tokens by the context before them, followed alone.
"""

from collections.abc import Callable, Sequence

import numpy as np

from rayfin.actors.messages import Int64Array, SchedulerInfo, StepResult
from rayfin.actors.timing import SKETCH_SECONDS, STEP_COST_SECONDS

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
"""Tokens of the steps that are measured; between them a straight line is drawn."""

SKETCHED_SIZES = (1, 8, 32)
"""The same where the start must be quick."""

RUNS = 2
GLOBAL_PACE, LOCAL_PACE = 0.05, 0.15
"""How much of a step's difference all sizes take over, and those beside it."""

LARGEST_RATIO = 2.0
"""A step that takes longer than expected counts as no more than so many times as long."""

ROWS_OF_A_WEIGHT, DEAR_ROWS_OF_A_WEIGHT = 32.0, 8.0
"""Without a measurement: tokens that take as long to compute as the weights to be read."""


class StepCost:
    """A table of seconds by tokens, with straight lines between its sizes.

    A context that grows, or a neighbour on the machine, changes all steps: a part of each
    difference goes to the whole table, so that sizes that are not run stay comparable.
    """

    def __init__(
        self, sizes: "Sequence[float] | np.ndarray", seconds: "Sequence[float] | np.ndarray"
    ) -> None:
        self._sizes = np.array(sizes, np.float64)
        self._seconds = np.maximum.accumulate(np.array(seconds, np.float64))

    @classmethod
    def assumed(cls) -> "StepCost":
        """A table without a unit: the same on all ranks of a group, which must decide alike."""
        return cls((1, 128), (1 + 1 / ROWS_OF_A_WEIGHT, 1 + 128 / ROWS_OF_A_WEIGHT))

    @classmethod
    def guessed(cls, tokens: int, seconds: float, max_tokens: int) -> "StepCost":
        """A table up to ``max_tokens``, from a step of so many ``tokens``: all that is known.

        Larger steps are thought to be dear, until one has run.
        """
        doubled = (
            1 << power for power in range(SIZES[-1].bit_length(), max_tokens.bit_length() + 1)
        )
        sizes = np.array([*SIZES, *doubled], np.float64)
        unit = seconds / (1 + tokens / DEAR_ROWS_OF_A_WEIGHT)
        return cls(sizes, unit * (1 + sizes / DEAR_ROWS_OF_A_WEIGHT))

    @classmethod
    def measured(
        cls, run: Callable[[int], float], max_tokens: int, limit: float = STEP_COST_SECONDS
    ) -> "StepCost":
        """The table of what ``run`` takes, a step of so many tokens, up to ``max_tokens``.

        Sizes for which ``limit`` seconds leave no time are drawn from those before.
        """
        sizes, seconds, spent = list[int](), list[float](), 0.0
        for size in SIZES:
            if len(sizes) > 1 and (size > max_tokens or spent > limit):
                break
            taken = [run(size) for _ in range(RUNS + (not sizes))]  # the first one warms up
            spent += sum(taken)
            sizes.append(size)
            seconds.append(min(taken))
        return cls(sizes, seconds)

    @classmethod
    def sketched(cls, run: Callable[[int], float], max_tokens: int) -> "StepCost":
        """The table of few runs, for a start that must be quick; steps that run improve it."""
        sizes, seconds, spent = list[int](), list[float](), run(1)  # which warms up
        for size in (size for size in SKETCHED_SIZES if size <= max_tokens):
            if spent > SKETCH_SECONDS and sizes:
                break
            taken = [run(size)]
            if spent + taken[0] <= SKETCH_SECONDS:  # the first step of a size may be slow
                taken.append(run(size))
            sizes.append(size)
            seconds.append(min(taken))
            spent += sum(taken)
        return cls(sizes, seconds) if len(sizes) > 1 else cls.guessed(1, seconds[0], max_tokens)

    def seconds(self, tokens: "Int64Array | int") -> np.ndarray:
        """Seconds of steps of so many tokens, in the shape of ``tokens``."""
        sizes, seconds = self._sizes, self._seconds
        inside = np.interp(tokens, sizes, seconds)
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return np.asarray(inside + np.maximum(np.subtract(tokens, sizes[-1]), 0) * slope)

    def tokens(self, seconds: float) -> int:
        """Most tokens of a step that takes ``seconds``; 0 if one token takes longer."""
        known, sizes = self._seconds, self._sizes
        if seconds < known[0]:
            return 0
        if seconds < known[-1]:
            after = int(np.searchsorted(known, seconds, side="right"))
            (low, high), (first, last) = sizes[after - 1 : after + 1], known[after - 1 : after + 1]
            return int(low + (high - low) * (seconds - first) / (last - first))
        slope = (known[-1] - known[-2]) / (sizes[-1] - sizes[-2])
        return int(sizes[-1] + (seconds - known[-1]) / slope) if slope else int(sizes[-1])

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens has taken so many seconds."""
        ratio = min(max(seconds / float(self.seconds(tokens)), 1 / LARGEST_RATIO), LARGEST_RATIO)
        share = np.interp(self._sizes, *_tent(self._sizes, tokens))
        pace = GLOBAL_PACE + LOCAL_PACE * share
        self._seconds = np.maximum.accumulate(self._seconds * ratio**pace)


def _tent(sizes: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """1 at ``tokens``, 0 from the next size on to either side."""
    after = int(np.searchsorted(sizes, tokens, side="right"))
    before = int(np.searchsorted(sizes, tokens, side="left")) - 1
    low = sizes[before] if before >= 0 else tokens - 1.0
    high = sizes[after] if after < len(sizes) else tokens + 1.0
    return np.array([low, float(tokens), high]), np.array([0.0, 1.0, 0.0])


LEVELS = 32
"""Powers of two of context."""

LEAST_WEIGHT = 0.1
"""Levels of less, in steps of the largest size, count as unknown, unless all are."""

LEAST_STEP = 10
"""Steps of less than the largest by so much say nothing, and cost no time."""


class PromptCost:
    """Seconds to compute a token of a prompt, by the context before it, from steps that ran.

    Attention makes late tokens dearer, so each power of two of context has a figure of its own.
    Steps of many tokens count most: in small ones a token seems dear, for the weights are read once
    in each.
    """

    def __init__(self) -> None:
        self._tokens = np.zeros(LEVELS)  # weighed
        self._seconds = np.zeros(LEVELS)  # weighed, of all those tokens
        self._most = 1  # prompt tokens of a step
        # Seconds of a token in each level, and of all tokens before it; None after a step. Other
        # threads ask too, so it is replaced as a whole.
        self._drawn: tuple[list[float], list[float]] | None = None

    def observe(self, info: SchedulerInfo, result: StepResult) -> None:
        """A step has run."""
        count = info.num_prefill_tokens
        if not result.seconds or count * LEAST_STEP <= self._most:
            return
        lengths = info.chunk_len[info.decoding_batch :]
        context = float(np.dot(info.kv_len[info.decoding_batch :] + lengths / 2, lengths)) / count
        level, self._drawn = int(context).bit_length(), None
        if count > self._most:  # what was learned from smaller steps counts less
            for book in (self._tokens, self._seconds):
                book *= (self._most / count) ** 2
            self._most = count
        share = (count / self._most) ** 2
        for book in (self._tokens, self._seconds):
            book[level] *= 1 - share * LOCAL_PACE
        self._tokens[level] += share
        self._seconds[level] += share * result.seconds / len(info.merge_prompt)

    def seconds(self, first: int, last: int) -> float:
        """Seconds to compute the tokens ``first`` to ``last`` of a prompt; 0 if none has run."""
        if (drawn := self._drawn) is None:
            drawn = self._drawn = self._draw()
        paces, before = drawn
        low, high = first.bit_length(), last.bit_length()
        until = before[high] + (last - (1 << high >> 1)) * paces[high]
        return max(until - before[low] - (first - (1 << low >> 1)) * paces[low], 0.0)

    def _draw(self) -> tuple[list[float], list[float]]:
        """Draws the table that ``seconds`` reads, which is asked for each of many sessions."""
        known = np.flatnonzero(self._tokens > min(LEAST_WEIGHT, self._tokens.max() / 2))
        paces, before = list[float](), [0.0]
        for level in range(LEVELS):
            pace = 0.0
            if len(known):
                nearest = known[np.abs(known - level).argmin()]
                pace = float(self._seconds[nearest] / self._tokens[nearest])
            paces.append(pace)
            before.append(before[-1] + pace * ((1 << level) - (1 << level >> 1)))
        return paces, before
