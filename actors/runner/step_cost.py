"""Seconds of a step by its tokens: measured when the runner starts, followed while it runs."""

from collections.abc import Callable, Sequence

import numpy as np

from rayfin.actors.messages import Int64Array, SchedulerInfo
from rayfin.actors.timing import STEP_COST_SECONDS

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
"""Tokens of the steps that are measured; between them a straight line is drawn."""

ROW_TOKENS = 8
RUNS = 2
GLOBAL_PACE, LOCAL_PACE = 0.05, 0.15
"""How much of a step's difference all sizes take over, and those beside it."""

LARGEST_RATIO = 2.0
"""A step that takes longer than expected counts as no more than so many times as long."""

ROWS_OF_A_WEIGHT = 32.0
"""Without a measurement: tokens that take as long to compute as the weights to be read."""


class StepCost:
    """A table of seconds by tokens, with straight lines between its sizes.

    A context that grows, or a neighbour on the machine, changes all steps: a part of each
    difference goes to the whole table, so that sizes that are not run stay comparable.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self._sizes = np.array(sizes, np.float64)
        self._seconds = np.maximum.accumulate(np.array(seconds, np.float64))

    @classmethod
    def assumed(cls) -> "StepCost":
        """A table without a unit: the same on all ranks of a group, which must decide alike."""
        return cls((1, 128), (1 + 1 / ROWS_OF_A_WEIGHT, 1 + 128 / ROWS_OF_A_WEIGHT))

    @classmethod
    def measured(
        cls, run: Callable[[int], float], most: int, limit: float = STEP_COST_SECONDS
    ) -> "StepCost":
        """The table of what ``run`` takes, a step of so many tokens, up to ``most`` of them.

        Sizes for which ``limit`` seconds leave no time are drawn from those before.
        """
        sizes, seconds, spent = list[int](), list[float](), 0.0
        for size in SIZES:
            if len(sizes) > 1 and (size > most or spent > limit):
                break
            taken = [run(size) for _ in range(RUNS + (not sizes))]  # the first one warms up
            spent += sum(taken)
            sizes.append(size)
            seconds.append(min(taken))
        return cls(sizes, seconds)

    def seconds(self, tokens: "Int64Array | int") -> np.ndarray:
        """Seconds of steps of so many tokens, in the shape of ``tokens``."""
        sizes, seconds = self._sizes, self._seconds
        inside = np.interp(tokens, sizes, seconds)
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return np.asarray(inside + np.maximum(np.subtract(tokens, sizes[-1]), 0) * slope)

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens has taken so many seconds."""
        ratio = min(max(seconds / float(self.seconds(tokens)), 1 / LARGEST_RATIO), LARGEST_RATIO)
        share = np.interp(self._sizes, *_tent(self._sizes, tokens))
        pace = GLOBAL_PACE + LOCAL_PACE * share
        self._seconds = np.maximum.accumulate(self._seconds * ratio**pace)


def decode_step(tokens: int, context: int, page_size: int) -> SchedulerInfo:
    """A step of so many tokens, ``ROW_TOKENS`` a row, at the end of one and the same context."""
    rows = -(-tokens // ROW_TOKENS)
    lengths = np.full(rows, min(tokens, ROW_TOKENS, context), np.int32)
    pages = np.full(rows, -(-context // page_size), np.int32)
    ids = np.arange(rows, dtype=np.int32)
    return SchedulerInfo(
        epoch=0,
        step=0,
        ids=ids,
        chunk_idx=(np.cumsum(lengths) - lengths).astype(np.int32),
        chunk_len=lengths,
        merge_prompt=np.zeros(int(lengths.sum()), np.int32),
        kv_len=context - lengths,
        kv_page_len=pages,
        last_pos=lengths - 1,
        is_decoding=np.ones(rows, np.bool_),
        decoding_batch=rows,
        prefill_batch=0,
        new_pages=np.tile(np.arange(pages[0], dtype=np.int32), rows),
        new_pages_len=pages,
    )


def _tent(sizes: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """1 at ``tokens``, 0 from the next size on to either side."""
    after = int(np.searchsorted(sizes, tokens, side="right"))
    before = int(np.searchsorted(sizes, tokens, side="left")) - 1
    low = sizes[before] if before >= 0 else tokens - 1.0
    high = sizes[after] if after < len(sizes) else tokens + 1.0
    return np.array([low, float(tokens), high]), np.array([0.0, 1.0, 0.0])
