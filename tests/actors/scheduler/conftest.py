"""An engine on fake runners, which check every step against the contract of SchedulerInfo."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def harness(simulate: ModuleType) -> Callable[..., Any]:
    """`make_harness` of tools/simulate.py: test folders hold no importable modules."""
    make: Callable[..., Any] = simulate.make_harness
    return make


@pytest.fixture(params=["v0", "v1"])
def scheduler(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[1, 2])
def steps_in_flight(request: pytest.FixtureRequest) -> int:
    return int(request.param)
