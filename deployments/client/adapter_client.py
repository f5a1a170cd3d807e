"""An engine client whose requests compute with one LoRA adapter."""

from collections.abc import AsyncGenerator, Sequence

from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.messages import Command, EngineInfo, EngineRequest, TokenDelta, TokenLog
from rayfin.actors.metrics.snapshot import EngineSnapshot
from rayfin.deployments.client.engine_client import EngineClient, EngineReport


class AdapterClient:
    """An ``EngineClient``: another one, with an adapter in each request.

    A request keeps the content that its adapter's name has now, whatever the name means later.
    """

    def __init__(self, client: EngineClient, adapter: AdapterRef) -> None:
        self._client = client
        self._adapter = adapter

    def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        if request.part(AdapterRef) is None:
            request.use(self._adapter)
        return self._client.stream(request)

    def close(self) -> None:
        self._client.close()

    async def info(self) -> EngineInfo:
        return await self._client.info()

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
        return self._client.latency()

    async def metrics(self) -> bytes:
        return await self._client.metrics()
