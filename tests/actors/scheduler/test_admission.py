"""A new gate is one class and one entry in the list; no file of the product changes."""

from collections.abc import Callable
from typing import Any

import pytest

from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import SchedulerState

Make = Callable[..., Any]


class OneTenantAtATime:
    """A toy of "at most so many adapters per step": requests of one tenant run together."""

    def __init__(self, state: SchedulerState) -> None:
        self._running = state.running
        self.refused = 0

    def may_admit(self, request: Request) -> bool:
        admitted = self.tenants() <= {request.source.tenant}
        self.refused += not admitted
        return admitted

    def tenants(self) -> set[str]:
        return {holder.source.tenant for holder in self._running.holders()}


@pytest.mark.parametrize("scheduler", ["v0", "v1"])
def test_a_gate_holds_back_the_next_request(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler)
    gate = OneTenantAtATime(h.engine.lifecycle.state)
    h.engine.lifecycle.admission.gates.append(gate)
    for tenant in ("a", "a", "b", "a", "b", "b"):
        h.add(5, 4, tenant=tenant)
    seen = set()
    while h.engine.has_work:
        h.step()
        assert len(gate.tenants()) <= 1
        seen |= gate.tenants()
    assert seen == {"a", "b"} and gate.refused > 0
    h.check()
