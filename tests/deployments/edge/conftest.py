"""What the tests with sockets share."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rayfin.deployments.edge.protocol import install

PATIENCE = 30.0  # seconds; only a failure waits so long

Listening = Callable[..., AbstractAsyncContextManager[int]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Listening:
    """uvicorn around an application, as Serve starts it in its proxy: gives the port."""
    monkeypatch.setattr(auto, "AutoHTTPProtocol", HttpToolsProtocol)
    assert install()

    @asynccontextmanager
    async def listen(app: Any, **options: Any) -> AsyncIterator[int]:
        config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", **options)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0)
        try:
            yield server.servers[0].sockets[0].getsockname()[1]
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, PATIENCE)

    return listen
