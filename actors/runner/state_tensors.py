"""The memory of recurrent layers: what a request's past is to them, in a row of fixed size.

A slot has two rows. A step reads the row that holds the request's state before its chunk and writes
the other one, so a step that fails midway and is computed again finds what it needs. Behind the
slots' rows are those of *snapshots*: states at the ends of pages, for requests with that prefix.

With drafts a state may have to go back, so there are *spare* rows, which all slots share: a step
writes the state behind each token of a draft to one of them. Once the sampler has said which drafts
are right, the spare row with the state behind those becomes the slot's own; nothing is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rayfin.cache.errors import CacheError

Rows = npt.NDArray[np.int64]
EMPTY = -1  # tokens in a row without a state
NOWHERE = -1  # a row to which nothing is written


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
    """Where the states of R rows of a step with T tokens are read, and where they go."""

    slots: Rows  # [R]
    read: Rows  # [R]; those of rows without a past are not used
    write: Rows  # [R]
    before: Rows  # [R] tokens of the request before the step
    after: Rows  # [R]
    drafts: Rows  # [R] tokens behind the first that may turn out to be wrong
    each: Rows | None = None  # [T] where the state behind a token goes beside, or NOWHERE; None
    # without drafts


class StateTensors:
    """States [rows, *shape] of every layer, with the number of tokens that each row stands for.

    Args:
        drafts: tokens that may be drafted in a step.
    """

    def __init__(
        self,
        layouts: Sequence[StateLayout],
        slots: int,
        snapshots: int,
        device: torch.device,
        drafts: int = 0,
    ) -> None:
        rows = 2 * slots + snapshots + drafts
        self.padding = rows
        """A row behind the others, whose state is no request's."""
        self.tensors = [
            torch.zeros(rows + 1, *layout.shape, dtype=layout.dtype, device=device)
            for layout in layouts
        ]
        self._lengths: Rows = np.full(rows, EMPTY, np.int64)
        self._own: Rows = np.arange(2 * slots).reshape(slots, 2)
        self._first_snapshot = 2 * slots
        self._spare: Rows = np.arange(rows - drafts, rows)
        self._current: Rows = np.zeros(slots, np.int64)  # 0 or 1: the row written last
        self._drafted: StateRows | None = None  # the last step, if its drafts are not verified

    @property
    def draft_room(self) -> int:
        """Most drafts of a step."""
        return len(self._spare)

    def begin(
        self, slots: Rows, before: Rows, after: Rows, drafting: npt.NDArray[np.bool_] | None = None
    ) -> StateRows:
        """The rows of a step for ``slots`` [R], whose requests have ``before`` [R] tokens.

        Args:
            after: [R] tokens behind the step.
            drafting: [R] whether a row's tokens behind its first are drafts; None: nowhere.

        Raises:
            CacheError: a slot does not have the state of its request, or drafts are too many.
        """
        self._drafted = None  # what it would have kept is computed again
        states = self._own[slots]
        in_first = self._lengths[states[:, 0]] == before
        lost = (before > 0) & ~in_first & (self._lengths[states[:, 1]] != before)
        if lost.any():
            first = int(np.flatnonzero(lost)[0])
            raise CacheError(f"slot {slots[first]} has no state of {before[first]} tokens")
        row = np.arange(len(slots))
        write = states[row, (in_first & (before > 0)).astype(np.int64)]
        read = states[row, (~in_first).astype(np.int64)]
        self._lengths[write] = EMPTY
        drafts = np.zeros(len(slots), np.int64)
        if drafting is None or not drafting.any():
            return StateRows(slots, read, write, before, after, drafts)
        drafts[drafting] = (after - before - 1)[drafting]
        each = self._place(after - before, drafts)
        return StateRows(slots, read, write, before, after, drafts, each)

    def commit(self, rows: StateRows) -> None:
        """All states of the step are written. Those behind drafts count once they are settled."""
        side = (self._own[rows.slots, 1] == rows.write).astype(np.int64)
        fresh = rows.before == 0
        self._lengths[rows.write] = rows.after
        self._lengths[self._own[rows.slots, 1 - side][fresh]] = EMPTY
        self._current[rows.slots] = side
        self._drafted = None if rows.each is None else rows

    def advance(self, slots: Rows, before: Rows, steps: Rows) -> StateRows:
        """The rows of the first of several steps, after which ``slots`` [R] count as computed.

        Each step writes what the one before has read, and reads what that has written.

        Args:
            before: [R] tokens of their requests before it.
            steps: [R] of each row, at least 1.

        Raises:
            CacheError: a slot does not have the state of its request.
        """
        rows = self.begin(slots, before, before + 1)
        last = np.where(steps % 2 == 1, rows.write, rows.read)
        self._lengths[rows.write + rows.read - last] = before + steps - 1
        self._lengths[last] = before + steps
        self._current[slots] = (self._own[slots, 1] == last).astype(np.int64)
        return rows

    def settle(self, lengths: Rows) -> None:
        """The requests of the last step's rows have ``lengths`` [R] tokens: drafts may be wrong."""
        rows, self._drafted = self._drafted, None
        assert rows is not None, "drafts are settled once, behind their step"
        wrong = np.flatnonzero((rows.drafts > 0) & (lengths < rows.after))
        slots, side = rows.slots[wrong], self._current[rows.slots[wrong]]
        kept = lengths[wrong] - rows.before[wrong]
        self._lengths[rows.write[wrong]] = EMPTY
        none = kept == 0  # a row that has failed stands where it was
        self._current[slots[none]] ^= 1
        wrong, slots, side, kept = (part[~none] for part in (wrong, slots, side, kept))
        first = (np.cumsum(rows.drafts) - rows.drafts)[wrong]
        place = first + kept - 1
        self._own[slots, side], self._spare[place] = self._spare[place], self._own[slots, side]
        self._lengths[self._own[slots, side]] = lengths[wrong]

    def assume(self, slots: Rows, tokens: Rows) -> None:
        """The ``slots`` [N] stand behind ``tokens`` [N], whatever was there: for timed steps."""
        self._lengths[self._own[slots, 0]] = tokens
        self._lengths[self._own[slots, 1]] = EMPTY
        self._current[slots] = 0

    def forget(self) -> None:
        """No slot has a state, and no snapshot."""
        self._lengths[:] = EMPTY
        self._current[:] = 0

    def copy(self, sources: Rows, targets: Rows) -> None:
        """The slots ``targets`` [N] get the states of the slots ``sources`` [N]."""
        self._enter(self._row(sources), targets)

    def save(self, slots: Rows, snapshots: Rows) -> None:
        """The ``snapshots`` [N] get the states of the ``slots`` [N]."""
        self._move(self._row(slots), self._first_snapshot + snapshots)

    def load(self, snapshots: Rows, slots: Rows) -> None:
        """The ``slots`` [N] get the states of the ``snapshots`` [N]."""
        self._enter(self._first_snapshot + snapshots, slots)

    def row_of(self, snapshot: int) -> int:
        """The row of ``tensors`` that a snapshot is."""
        return self._first_snapshot + snapshot

    def saved(self, snapshot: int, tokens: int) -> None:
        """A snapshot stands for so many tokens now: its row was written from elsewhere."""
        self._lengths[self.row_of(snapshot)] = tokens

    def _place(self, lengths: Rows, drafts: Rows) -> Rows:
        """``StateRows.each``, for rows of so many tokens [R] and ``drafts`` [R] among them."""
        total = int(drafts.sum())
        if total > len(self._spare):
            raise CacheError(f"{total} drafts, and there are states for {len(self._spare)}")
        starts, first = np.cumsum(lengths) - lengths, np.cumsum(drafts) - drafts
        each = np.full(int(lengths.sum()), NOWHERE, np.int64)
        each[np.repeat(starts - first, drafts) + np.arange(total)] = self._spare[:total]
        return each

    def _enter(self, sources: Rows, slots: Rows) -> None:
        self._move(sources, self._own[slots, 0])
        self._lengths[self._own[slots, 1]] = EMPTY
        self._current[slots] = 0

    def _row(self, slots: Rows) -> Rows:
        rows: Rows = self._own[slots, self._current[slots]]
        return rows

    def _move(self, sources: Rows, targets: Rows) -> None:
        for tensor in self.tensors:
            from_, to = (
                torch.from_numpy(rows.astype(np.int64)).to(tensor.device)
                for rows in (sources, targets)
            )
            tensor.index_copy_(0, to, tensor.index_select(0, from_))
        self._lengths[targets] = self._lengths[sources]
