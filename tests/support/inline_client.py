"""A real model in this process as the engine of an ingress; one request at a time."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from rayfin import LLM
from rayfin.actors.messages import EngineInfo, EngineRequest, TokenDelta
from rayfin.deployments.client.deltas import split_deltas
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.media.reader import MediaReader
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.offline.engines import OfflineEngine
from rayfin.deployments.text.parsing.detect import detect
from rayfin.deployments.text.tokenizer import Tokenizer


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


def media_service(
    llm: LLM, model: Any, settings: MediaSettings, template: str | None = None
) -> OpenAIService:
    """A model that sees or hears (a folder and a processor) behind the API, in this process.

    Args:
        template: of chats, where the folder has none.
    """
    tokenizer = Tokenizer.load(model.folder)
    template = None if tokenizer.inner.chat_template else template
    client: Any = InlineClient(llm._engine)
    return OpenAIService(
        client=client,
        tokenizer=tokenizer,
        model_names=["tiny"],
        max_model_len=llm._engine.info.max_model_len,
        chat_template=template,
        formats=detect(tokenizer, template),
        media=MediaReader(model.processor, settings),
    )
