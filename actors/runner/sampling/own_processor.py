"""A logits processor of a user's own: what it raises fails the request's row, and no other."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rayfin.actors.errors import RequestFailed
from rayfin.actors.messages import NewRequest
from rayfin.actors.plugins import name_of
from rayfin.actors.runner.sampling.device_rules import DeviceRules
from rayfin.actors.runner.sampling.processor import LogitsProcessor, Rows

logger = logging.getLogger(__name__)


class OwnProcessor:
    """A LogitsProcessor over one by ``make``, which gets one row at a time; ``spent`` its seconds.

    The rows of a request that it fails have no token left, and ``failure`` says why.
    """

    def __init__(
        self,
        make: Callable[[torch.device], LogitsProcessor],
        spent: Counter[str],
        device: torch.device,
    ) -> None:
        self._inner = make(device)
        self._name = name_of(type(self._inner))
        self._spent: Any = spent  # Counter's type is that of whole numbers
        self._failed: dict[int, RequestFailed] = {}  # by slot

    def add(self, slot: int, request: NewRequest) -> bool:
        self._failed.pop(slot, None)
        return bool(self._kept(slot, True, self._inner.add, slot, request))

    def remove(self, slot: int) -> None:
        self._kept(slot, None, self._inner.remove, slot)
        self._failed.pop(slot, None)

    def is_active(self, slot: int, position: int) -> bool:
        active = self._kept(slot, True, self._inner.is_active, slot, position)
        return slot in self._failed or bool(active)

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        for index, slot, position in zip(rows.index, rows.slots, rows.positions, strict=True):
            row = Rows([index], [slot], [position])
            self._kept(slot, None, self._inner.apply, logits, row)
            if slot in self._failed:
                logits[index] = -torch.inf

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        self._kept(slot, None, self._inner.accept, slot, tokens)

    def rollback(self, slot: int, count: int) -> None:
        self._kept(slot, None, self._inner.rollback, slot, count)

    def device_rules(self, slot: int) -> DeviceRules | None:
        rules: DeviceRules | None = self._kept(slot, None, self._inner.device_rules, slot)
        return rules

    def failure(self, slot: int) -> RequestFailed | None:
        """Why the slot's request has no token, if it is for what was raised here."""
        return self._failed.get(slot)

    def _kept(self, slot: int, answer: Any, method: Callable[..., Any], *args: Any) -> Any:
        """What a method returns; ``answer`` if it raises, and for a slot that has failed."""
        if slot in self._failed:
            return answer
        began = time.perf_counter()
        try:
            return method(*args)
        except Exception as error:
            logger.exception("plugin %s has raised", self._name)
            why = f"plugin {self._name}: {type(error).__name__}: {error}"
            self._failed[slot] = RequestFailed(why)
            return answer
        finally:
            self._spent[self._name] += time.perf_counter() - began
