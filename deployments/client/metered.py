"""An engine client that counts for the ingress: when each token arrived, and what was lost."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rayfin.actors.messages import (
    Command,
    EngineInfo,
    EngineRequest,
    TokenDelta,
    TokenLog,
)
from rayfin.actors.metrics.engine_stats import ENGINE_METRICS, engine_report
from rayfin.actors.metrics.ledger import Ledger
from rayfin.actors.metrics.render import render
from rayfin.actors.metrics.snapshot import EngineSnapshot
from rayfin.actors.parts import RequestPart
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.client.pool import EnginePool
from rayfin.deployments.telemetry.hub_client import HubClient
from rayfin.deployments.telemetry.ingress_counters import INGRESS_METRICS, IngressCounters

if TYPE_CHECKING:  # its packages are an extra
    from rayfin.deployments.telemetry.tracing import Tracing


class MeteredEngineClient:
    """The ``EngineClient`` of an ingress: an ``EnginePool``, its health, and its metrics.

    Args:
        hub: gathers the metrics of all processes; without one, only those of this ingress are
            rendered.
        alias: further names of the series, "vllm" or None; for when the hub is gone.
    """

    def __init__(
        self,
        client: EnginePool,
        counts: IngressCounters,
        model_name: str,
        hub: HubClient | None = None,
        alias: str | None = None,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._client = client
        self._counts = counts
        self._model_name = model_name
        self._hub = hub
        self._alias = alias
        self._own = Ledger()  # without a hub
        client.events.observers = [self._meter, *([] if tracing is None else [tracing.observe])]
        client.events.replayed = self._replayed
        client.events.moved = self._moved
        client.events.transported = counts.transit.observe

    def close(self) -> None:
        self._client.close()

    async def prepare(self, part: RequestPart) -> None:
        await self._client.prepare(part)

    async def info(self) -> EngineInfo:
        return await self._client.info()

    def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        return self._client.stream(request)

    async def check_health(self) -> None:
        await self._client.check_health()

    async def recall(self, tenant: str, request_ids: Sequence[str]) -> list[TokenLog | None]:
        return await self._client.recall(tenant, request_ids)

    async def snapshots(self) -> list[EngineSnapshot]:
        return await self._client.snapshots()

    async def engines(self) -> list[EngineReport]:
        return await self._client.engines()

    async def manage(self, command: Command, engine: str | None) -> list[EngineReport]:
        return await self._client.manage(command, engine)

    def latency(self) -> dict[str, tuple[float, int]]:
        return self._counts.latency()

    async def metrics(self) -> bytes:
        """The text of the hub; without one, of what is known here: no counter goes backwards."""
        if self._hub is not None:
            if (text := await self._hub.scrape()) is not None:
                return text
        asked = time.time()
        engines = await self._client.stats()
        known, now = self._own if self._hub is None else self._hub.known, time.monotonic()
        known.apply(self._counts.report(), now)
        for engine, stats in engines.items():
            known.apply(engine_report(engine, stats, asked), now)
        metrics = (*ENGINE_METRICS, *INGRESS_METRICS)
        return await asyncio.to_thread(render, self._model_name, self._alias, known.copy(), metrics)

    @contextmanager
    def _meter(self, request: EngineRequest) -> Iterator[Callable[[TokenDelta], None]]:
        """Observes one stream; gives the function to call with each delta."""
        counts, now = self._counts, time.monotonic()
        started = request.arrival or now
        counts.ingress_time.observe(now - started)
        group = request.key if request.parent_key is None else request.parent_key
        counts.begun(group)
        last: float | None = None
        tokens, finished = 0, False

        def observe(delta: TokenDelta) -> None:
            nonlocal last, tokens, finished
            if count := len(delta.tokens):
                now = time.monotonic()
                if last is None:
                    counts.ttft.observe(now - started)
                    if count > 1:
                        counts.itl.observe(0.0, count - 1)
                else:
                    counts.itl.observe((now - last) / count, count)
                last = now
                tokens += count
            if delta.finish_reason is not None:
                finished = True
                counts.e2e.observe(time.monotonic() - started)

        try:
            yield observe
        except asyncio.CancelledError:
            counts.disconnects += 1
            raise
        except GeneratorExit:  # closed by this side, at its end or before it by a stop string
            if not finished:
                counts.e2e.observe(time.monotonic() - started)
            raise
        finally:
            counts.over(group, tokens)

    def _replayed(self, reason: str) -> None:
        self._counts.replays[reason] += 1

    def _moved(self, reason: str, result: str) -> None:
        self._counts.moves[reason, result] += 1
