"""A stream on the wire: its events, comments where it is silent, and whose end it is."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from rayfin.deployments.openai import sse
from rayfin.deployments.openai.sse import COMMENT, EventStream

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def stay() -> Any:
    await asyncio.Event().wait()


async def nothing() -> AsyncGenerator[None, None]:
    return
    yield


async def test_a_silent_stream_is_commented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between events, as often as it takes; never before the first one or after the last."""
    monkeypatch.setattr(sse, "COMMENT_SECONDS", 0.001)
    sent: list[dict[str, Any]] = []
    comments = 0

    async def send(message: Any) -> None:
        nonlocal comments
        sent.append(message)
        comments += message.get("body") == COMMENT.encode()

    async def events() -> AsyncGenerator[str, None]:
        await asyncio.sleep(0.01)
        yield "data: 1\n\n"
        while comments < 3:
            await asyncio.sleep(0)
        yield "data: 2\n\n"

    await EventStream(events(), nothing())({"type": "http"}, stay, send)
    start, *bodies, last = sent
    assert start["type"] == "http.response.start" and not last["more_body"]
    text = b"".join(message["body"] for message in bodies).decode()
    assert text.replace(COMMENT, "") == "data: 1\n\ndata: 2\n\n"
    assert text.startswith("data: 1") and text.count(COMMENT) >= 3


async def test_a_client_that_leaves_a_silent_stream() -> None:
    async def events() -> AsyncGenerator[str, None]:
        await asyncio.Event().wait()
        yield ""

    async def leave() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message["type"] == "http.response.start"

    await EventStream(events(), nothing())({"type": "http"}, leave, send)
