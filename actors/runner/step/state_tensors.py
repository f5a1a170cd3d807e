"""The memory of recurrent layers: what a request's past is to them, in a row of fixed size.

A slot has two rows. A step reads the row that holds the request's state before its chunk and writes
the other one, so a step that fails midway and is computed again finds what it needs. Behind the
slots' rows are those of *snapshots*: states at the ends of pages, for requests with that prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rayfin.cache.errors import CacheError

Rows = npt.NDArray[np.int64]
EMPTY = -1  # tokens in a row without a state


@dataclass(frozen=True, slots=True)
class StateLayout:
    """One state of one layer, per request."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where the states of R rows of a step are read, and where they go."""

    read: Rows  # [R]; those of rows without a past are not used
    write: Rows  # [R]
    before: Rows  # [R] tokens of the request before the step
    after: Rows  # [R]


class StateTensors:
    """States [rows, *shape] of every layer, with the number of tokens that each row stands for."""

    def __init__(
        self, layouts: Sequence[StateLayout], slots: int, snapshots: int, device: torch.device
    ) -> None:
        rows = 2 * slots + snapshots
        self.tensors = [
            torch.zeros(rows, *layout.shape, dtype=layout.dtype, device=device)
            for layout in layouts
        ]
        self._lengths: Rows = np.full(rows, EMPTY, np.int64)
        self._first_snapshot = 2 * slots
        self._current: Rows = np.zeros(slots, np.int64)  # 0 or 1: the row written last

    def begin(self, slots: Rows, before: Rows, after: Rows) -> StateRows:
        """The rows of a step for ``slots`` [R], whose requests have ``before`` [R] tokens.

        Raises:
            CacheError: a slot does not have the state of its request.
        """
        first = 2 * slots
        in_first = self._lengths[first] == before
        lost = (before > 0) & ~in_first & (self._lengths[first + 1] != before)
        if lost.any():
            row = int(np.flatnonzero(lost)[0])
            raise CacheError(f"slot {slots[row]} has no state of {before[row]} tokens")
        write = first + (in_first & (before > 0))
        self._lengths[write] = EMPTY
        return StateRows(first + ~in_first, write, before, after)

    def commit(self, rows: StateRows) -> None:
        """All states of the step are written."""
        self._lengths[rows.write] = rows.after
        self._lengths[rows.write[rows.before == 0] ^ 1] = EMPTY
        self._current[rows.write // 2] = rows.write % 2

    def copy(self, sources: Rows, targets: Rows) -> None:
        """The slots ``targets`` [N] get the states of the slots ``sources`` [N]."""
        self._move(self._row(sources), 2 * targets)
        self._lengths[2 * targets + 1] = EMPTY
        self._current[targets] = 0

    def save(self, slots: Rows, snapshots: Rows) -> None:
        """The ``snapshots`` [N] get the states of the ``slots`` [N]."""
        self._move(self._row(slots), self._first_snapshot + snapshots)

    def load(self, snapshots: Rows, slots: Rows) -> None:
        """The ``slots`` [N] get the states of the ``snapshots`` [N]."""
        self._move(self._first_snapshot + snapshots, 2 * slots)
        self._lengths[2 * slots + 1] = EMPTY
        self._current[slots] = 0

    def _row(self, slots: Rows) -> Rows:
        rows: Rows = 2 * slots + self._current[slots]
        return rows

    def _move(self, sources: Rows, targets: Rows) -> None:
        for tensor in self.tensors:
            from_, to = (
                torch.from_numpy(rows.astype(np.int64)).to(tensor.device)
                for rows in (sources, targets)
            )
            tensor.index_copy_(0, to, tensor.index_select(0, from_))
        self._lengths[targets] = self._lengths[sources]
