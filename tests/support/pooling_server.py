"""Tiny models behind the real HTTP layer; no sockets."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from inline_client import InlineClient
from rayfin.actors.config import EngineArgs
from rayfin.actors.messages import EngineRequest, TokenDelta
from rayfin.actors.model_files.pooling_folder import read_recipe
from rayfin.deployments.api.app import build_api
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.offline.engines import start_engine
from rayfin.deployments.text.tokenizer import Tokenizer

SETTINGS: dict[str, Any] = {"threads": 1, "num_pages": 64, "max_decoding_batch": 8}


class SerialClient(InlineClient):
    """Runs one request after the other, however many come at once."""

    def __init__(self, engine: Any) -> None:
        InlineClient.__init__(self, engine)
        self._frees: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}  # each test has a loop

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        async with self._frees.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            async for delta in InlineClient.stream(self, request):
                yield delta


def make_service(folder: Path | str, name: str = "tiny", **settings: Any) -> OpenAIService:
    args = EngineArgs(model=str(folder), **(SETTINGS | settings))
    engine = start_engine("inline", args)
    return OpenAIService(
        client=SerialClient(engine),  # type: ignore[arg-type]
        tokenizer=Tokenizer.load(folder),
        model_names=[name],
        max_model_len=engine.info.max_model_len,
        recipe=read_recipe(args),
    )


def serve(*services: OpenAIService) -> httpx.AsyncClient:
    """An HTTP client of an ingress over the services."""
    first = services[0]  # all share the ingress' load
    shared = [replace(own, load=first.load, answers=first.answers) for own in services]
    transport = httpx.ASGITransport(build_api(*shared))
    return httpx.AsyncClient(transport=transport, base_url="http://rayfin")
