"""What watches a runner's steps without being part of their computation, as a list.

A further observer is one more entry of ``RunnerPlugins.observers``.
"""

from collections import Counter
from typing import Protocol

import numpy as np
import torch

from rayfin.actors import failpoints
from rayfin.actors.messages import Int32Array, Int64Array, SchedulerInfo, StepResult
from rayfin.actors.plugins import PluginUsage
from rayfin.actors.runner.parallel.groups import ProcessGroups


class StepObserver(Protocol):
    """Watches the calls of a runner; to derive from `Observer` saves the empty methods."""

    in_turn: bool
    """Whether a call may begin only after the one before has ended. It keeps a GPU waiting."""

    def before(self, info: SchedulerInfo) -> None:
        """A call begins. Its page moves are made and its diff is applied."""

    def forwarded(self, info: SchedulerInfo, rows: Int64Array, logits: torch.Tensor) -> None:
        """A forward of the call has given logits [L, V], which the ``rows`` [S] sample from."""

    def after(self, info: SchedulerInfo, result: StepResult) -> None:
        """A call ends with ``result``."""

    def overwritten(self, pages: Int32Array) -> None:
        """``pages`` [N] will hold what a file holds. Another thread calls it."""

    def close(self) -> None:
        """The cache's pages are about to be freed."""


class Observer:
    """A StepObserver that does nothing, to derive from."""

    in_turn = True

    def before(self, info: SchedulerInfo) -> None:
        pass

    def forwarded(self, info: SchedulerInfo, rows: Int64Array, logits: torch.Tensor) -> None:
        pass

    def after(self, info: SchedulerInfo, result: StepResult) -> None:
        pass

    def overwritten(self, pages: Int32Array) -> None:
        pass

    def close(self) -> None:
        pass


class PluginTimes(Observer):
    """Reports the seconds that plug-ins add to ``spent``."""

    in_turn = False

    def __init__(self, spent: Counter[str]) -> None:
        self._spent = spent

    def after(self, info: SchedulerInfo, result: StepResult) -> None:
        """Moves them to the result."""
        if self._spent:
            result.usage.append(PluginUsage(dict(self._spent)))
            self._spent.clear()


class RowFaults(Observer):
    """Passes the failpoint ``runner.row`` for each row of each forward."""

    in_turn = False  # with failpoints no step is queued ahead

    def forwarded(self, info: SchedulerInfo, rows: Int64Array, logits: torch.Tensor) -> None:
        if not failpoints.ACTIVE:
            return
        step = {"epoch": info.epoch, "step": info.step}
        nan = [
            row
            for row in range(len(info.ids))
            if failpoints.ACTIVE.hit("runner.row", **step, tokens=info.chunk_prompt(row)) == "nan"
        ]
        if nan:
            logits[np.isin(rows, nan).nonzero()[0]] = torch.nan


class RankAgreement(Observer):
    """Checks that all ranks of a group are at the same step."""

    in_turn = False  # a step that is queued ahead is recorded: its sums are not counted

    def __init__(self, peers: ProcessGroups) -> None:
        self._peers = peers

    def forwarded(self, info: SchedulerInfo, rows: Int64Array, logits: torch.Tensor) -> None:
        if info.num_steps == 1:  # the exchange runs while tokens are sampled
            self._peers.begin_agreement(info.step)

    def after(self, info: SchedulerInfo, result: StepResult) -> None:
        self._peers.agree(info.step)
