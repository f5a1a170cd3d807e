"""Grammars and adapters that a ``FakeExecutor`` prepares for a while."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fake_runner import FakeExecutor


@dataclass(slots=True)
class FakePrepare:
    executor: "FakeExecutor"
    grammars: tuple[str, ...]
    due: float  # when it is done
    epoch: int

    def done(self) -> bool:
        return self.executor.clock >= self.due or self._is_lost()

    def error(self) -> str | None:
        """What a failing grammar says, unless its runner has died before it could say so."""
        failing = self.executor.grammar_errors.intersection(self.grammars)
        return (
            f"the toy does not compile {min(failing)}" if failing and not self._is_lost() else None
        )

    def _is_lost(self) -> bool:
        executor = self.executor
        return executor.is_dead or (executor.epoch != self.epoch and executor.clock < self.due)
