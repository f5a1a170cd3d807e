"""Which of a step's log probabilities go where: they are told by index, and rows are picked."""

import numpy as np

from rayfin.actors.messages import BoolArray, Int64Array, Logprobs, StepResult


def compacted(rows: BoolArray) -> Int64Array:
    """The index that each of ``rows`` [N] has among the picked ones; -1 for the others."""
    return np.where(rows, np.cumsum(rows) - 1, -1)


def column_logprobs(result: StepResult, column: int, rows: BoolArray) -> Logprobs | None:
    """Those of one step of the lease, by the index that the row has among ``rows`` [R]."""
    if result.logprobs is None:
        return None
    to = np.full(result.tokens.shape, -1, np.int64)
    to[:, column] = compacted(rows)
    return result.logprobs.renumbered(to.reshape(-1))
