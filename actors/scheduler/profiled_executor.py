"""An executor that notes when steps are sent and when they are answered, during a profile."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.parts import Need
from rayfin.actors.profile import ProfileOrder, SchedulerSpan
from rayfin.actors.scheduler.executor import Executor, PendingPrepare, PendingStep


def profiled(executor: Executor, folder: str | None) -> Executor:
    """Returns the same executor, or with --profile-dir one around it."""
    return executor if folder is None else cast(Executor, ProfiledExecutor(executor))


class ProfiledExecutor:
    """An ``Executor`` over ``inner``; the order that ends a profile takes its spans along."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._spans: list[SchedulerSpan] | None = None  # of the profile that is taken
        self._left = 0  # steps of it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, info: SchedulerInfo) -> PendingStep:
        spans, begin = self._spans, time.time_ns()
        pending = self._inner.submit(info)
        if spans is None or self._left == 0:
            return pending
        self._left -= 1
        return _NotedStep(pending, spans, f"step {info.epoch}.{info.step}", begin)

    def prepare(self, needs: Sequence[Need]) -> PendingPrepare:
        return self._inner.prepare([self._noted(need) for need in needs])

    def _noted(self, need: Need) -> Need:
        order = need.what
        if not isinstance(order, ProfileOrder):
            return need
        if order.stop:
            spans, self._spans = self._spans or (), None
            return replace(need, what=replace(order, spans=tuple(spans)))
        if self._spans is None:
            self._spans, self._left = [], order.delay + order.steps
        return need


@dataclass(slots=True)
class _NotedStep:
    pending: PendingStep
    spans: list[SchedulerSpan]
    name: str
    begin: int

    def result(self) -> StepResult:
        result = self.pending.result()
        self.spans.append(SchedulerSpan(self.name, self.begin, time.time_ns()))
        return result
