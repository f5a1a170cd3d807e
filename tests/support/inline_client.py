"""A real model in this process as the engine of an ingress; one request at a time."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from rayfin.actors.messages import EngineInfo, EngineRequest, TokenDelta
from rayfin.deployments.client.deltas import split_deltas
from rayfin.deployments.offline.engines import OfflineEngine


class InlineClient:
    """What the routes that generate need of an ``EngineClient``."""

    def __init__(self, engine: OfflineEngine) -> None:
        self.engine = engine
        self.seen: list[EngineRequest] = []
        self._turns: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}  # each test has a loop

    def close(self) -> None:
        pass

    async def info(self) -> EngineInfo:
        return self.engine.info

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        self.seen.append(request)
        names = {request.key: request.request_id}
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            for message in self.engine.run([request]):
                for end in message.ended:
                    if end.error is not None:
                        raise end.error
                for _, delta in split_deltas(message, names):
                    yield delta
                await asyncio.sleep(0)

    async def recall(self, tenant: str, request_ids: Any) -> list[None]:
        return [None for _ in request_ids]
