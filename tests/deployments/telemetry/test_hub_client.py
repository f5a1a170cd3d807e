"""An ingress reports to its hub, does without it, and starts it again with the same totals."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from rayfin.actors.metrics.ledger import INGRESSES, CounterReport, Ledger
from rayfin.deployments.client.metered import MeteredEngineClient
from rayfin.deployments.client.pool import PoolEvents
from rayfin.deployments.telemetry import hub_client as hub_link
from rayfin.deployments.telemetry.hub_client import MISSES, HubClient
from rayfin.deployments.telemetry.ingress_counters import IngressCounters

pytestmark = pytest.mark.anyio
LEFT = ("client_disconnects", ())
PATIENCE = 30.0  # seconds; only a failure waits so long


class Method:
    def __init__(self, call: Callable[[CounterReport], Awaitable[Any]]) -> None:
        self.remote = call


class Hub:
    """A MetricsHub without Ray."""

    def __init__(self, known: Ledger) -> None:
        self.ledger = known.copy()
        self.dead = self.hung = False
        self.busy: asyncio.Event | None = None  # scrapes wait for it
        self.report = Method(self._report)
        self.scrape = Method(self._scrape)

    async def _report(self, report: CounterReport) -> Ledger:
        await self._answer(report)
        return self.ledger.copy()

    async def _scrape(self, report: CounterReport) -> bytes:
        if self.busy is not None:
            await self.busy.wait()
        await self._answer(report)
        return self._text()

    def _text(self) -> bytes:
        return f"left {self.ledger.totals[INGRESSES].counters[LEFT]:g}".encode()

    async def _answer(self, report: CounterReport) -> None:
        if self.dead:
            raise ActorDiedError
        if self.hung:
            await asyncio.Event().wait()
        self.ledger.apply(report, 0.0)


class Registry:
    """Starts hubs."""

    def __init__(self) -> None:
        self.hubs: list[Hub] = []
        self.killed: list[Hub] = []
        self.fails = False

    def start(self, known: Ledger) -> Hub:
        if self.fails:
            raise ValueError("the registry is away")
        if not self.hubs or self.hubs[-1].dead:
            self.hubs.append(Hub(known))
        return self.hubs[-1]

    def kill(self, hub: Hub) -> None:
        hub.dead = True
        self.killed.append(hub)


class FakeEngines:
    """The engines' client, with none."""

    def __init__(self) -> None:
        self.events = PoolEvents()

    async def stats(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_link, "HUB_REPORT_SECONDS", 0.001)
    monkeypatch.setattr(hub_link, "HUB_REPORT_ANSWER_SECONDS", PATIENCE)
    monkeypatch.setattr(hub_link, "INGRESS_SCRAPE_SECONDS", 20.0)  # what a fake hub says is of now


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def connect(registry: Registry, counts: IngressCounters) -> tuple[HubClient, MeteredEngineClient]:
    link = HubClient(registry.start, registry.kill, counts.report)
    engines: Any = FakeEngines()
    return link, MeteredEngineClient(engines, counts, "m", link)


def left(text: bytes) -> float:
    """The disconnects in the text, of a fake hub or by the ingress itself."""
    lines = [
        line for line in text.decode().splitlines() if "left" in line or "disconnects_t" in line
    ]
    return float(lines[-1].split()[-1])


async def test_no_counter_goes_backwards_when_the_hub_dies() -> None:
    registry, counts = Registry(), IngressCounters()
    link, observed = connect(registry, counts)
    await until(lambda: registry.hubs)
    other = IngressCounters()
    other.disconnects = 10  # one that has died meanwhile: only the hub knows
    registry.hubs[0].ledger.apply(other.report(), 0.0)
    counts.disconnects = 1
    await until(lambda: link.known.totals and link.known.totals[INGRESSES].counters[LEFT] == 11)
    assert await observed.metrics() == b"left 11"

    registry.fails = registry.hubs[0].dead = True
    counts.disconnects = 2
    for _ in range(3):  # its own words, and what the hub had said
        text = await observed.metrics()
        assert text.startswith(b"# HELP rayfin_") and left(text) == 12
    counts.disconnects = 3
    assert left(await observed.metrics()) == 13

    registry.fails = False
    await until(lambda: len(registry.hubs) == 2 and link.known is not None)
    await until(lambda: link.known.totals[INGRESSES].counters[LEFT] == 13)
    assert await observed.metrics() == b"left 13"
    link.close()


async def test_a_hub_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ("HUB_REPORT_ANSWER_SECONDS", "INGRESS_SCRAPE_SECONDS")

    class Patient(Registry):
        """The hubs after the first have the time that they need."""

        def kill(self, hub: Hub) -> None:
            for name in limits:
                monkeypatch.setattr(hub_link, name, PATIENCE)
            super().kill(hub)

    registry, counts = Patient(), IngressCounters()
    link, observed = connect(registry, counts)
    await until(lambda: link.known.totals)
    registry.hubs[0].hung = True
    for name in limits:
        monkeypatch.setattr(hub_link, name, 0.05)
    assert (await observed.metrics()).startswith(b"# HELP rayfin_")
    await until(lambda: len(registry.hubs) == 2)
    assert registry.killed == registry.hubs[:1] and MISSES > 1
    await until(lambda: link._misses == 0 and not registry.hubs[1].dead)
    assert await observed.metrics() == b"left 0"
    link.close()


async def test_a_scrape_does_not_wait_for_a_busy_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ingress tells the hub's last totals, and its own counters as they are now."""
    monkeypatch.setattr(hub_link, "HUB_REPORT_SECONDS", 3600.0)
    registry, counts = Registry(), IngressCounters()
    hub, other = registry.start(Ledger()), IngressCounters()
    other.disconnects = 10
    hub.ledger.apply(other.report(), 0.0)
    link, observed = connect(registry, counts)
    await until(lambda: link.known.totals)  # its one report
    hub.busy = asyncio.Event()
    monkeypatch.setattr(hub_link, "INGRESS_SCRAPE_SECONDS", 0.001)
    counts.disconnects = 1
    text = await observed.metrics()
    assert text.startswith(b"# HELP rayfin_") and left(text) == 11
    hub.busy.set()
    monkeypatch.setattr(hub_link, "INGRESS_SCRAPE_SECONDS", 20.0)
    assert await observed.metrics() == b"left 11"
    link.close()


async def test_there_are_metrics_before_there_is_a_hub() -> None:
    registry = Registry()
    registry.fails = True
    link, observed = connect(registry, IngressCounters())
    assert left(await observed.metrics()) == 0
    link.close()
