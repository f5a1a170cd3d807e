"""An engine client that keeps the ingress' books: when each token reached the edge."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from rayfin.actors.messages import EngineInfo, EngineRequest, TokenDelta, TokenLog
from rayfin.actors.metrics import IngressMetrics
from rayfin.actors.scheduler.commands import Command
from rayfin.actors.snapshot import EngineSnapshot
from rayfin.deployments.admin.report import EngineReport
from rayfin.deployments.ray_client import RayEngineClient
from rayfin.deployments.tracing import Tracing


class ObservedClient:
    """The ``EngineClient`` of an ingress: a RayEngineClient, its health, and its metrics."""

    def __init__(
        self, client: RayEngineClient, metrics: IngressMetrics, tracing: Tracing | None = None
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._tracing = tracing
        client.on_replay = lambda reason: metrics.replays[reason].inc()

    async def info(self) -> EngineInfo:
        return await self._client.info()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        metrics = self._metrics
        started = time.monotonic()
        last: float | None = None
        finished = False
        try:
            async with aclosing(self._stream(request)) as deltas:
                async for delta in deltas:
                    now = time.monotonic()
                    if delta.tokens and last is None:
                        metrics.time_to_first_token.observe(now - started)
                    elif delta.tokens and last is not None:
                        metrics.inter_token_latency.observe(now - last)
                    last = now if delta.tokens else last
                    if delta.finish_reason is not None:
                        finished = True
                        metrics.e2e_request_latency.observe(now - started)
                    yield delta
        except asyncio.CancelledError:
            metrics.disconnects.inc()
            raise
        except GeneratorExit:  # closed by this side: at its end, or before it by a stop string
            if not finished:
                metrics.e2e_request_latency.observe(time.monotonic() - started)
            raise

    def _stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        deltas = self._client.stream(request)
        return deltas if self._tracing is None else self._tracing.follow(request, deltas)

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
        return self._metrics.latency()

    async def metrics(self) -> bytes:
        return self._metrics.render(await self._client.stats())
