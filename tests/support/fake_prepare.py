"""Grammars and adapters that a ``FakeExecutor`` prepares for a while."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.guidance import GRAMMAR_FAILED

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

    def error(self) -> InvalidRequest | None:
        """What a failing grammar says, unless its runner has died before it could say so."""
        failing = self.executor.grammar_errors.intersection(self.grammars)
        if not failing or self._is_lost():
            return None
        return InvalidRequest(f"the toy does not compile {min(failing)}", None, GRAMMAR_FAILED)

    def _is_lost(self) -> bool:
        executor = self.executor
        return executor.is_dead or (executor.epoch != self.epoch and executor.clock < self.due)
