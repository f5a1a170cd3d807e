"""A stream on the wire: its events, comments where it is silent, and whose end it is."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from starlette.requests import Request

from rayfin.actors.errors import RequestFailed
from rayfin.deployments.generation.route import GenerationAdapter, first_of, stream_events
from rayfin.deployments.http import sse
from rayfin.deployments.http.sse import COMMENT, DONE, EventStream

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def stay() -> Any:
    await asyncio.Event().wait()


async def nothing() -> AsyncGenerator[None, None]:
    return
    yield


async def test_a_silent_stream_is_commented() -> None:
    """Before events and between them, as often as it takes; never after the last."""
    sent: list[dict[str, Any]] = []
    comments = 0

    async def send(message: Any) -> None:
        nonlocal comments
        sent.append(message)
        comments += message.get("body") == COMMENT.encode()

    async def events() -> AsyncGenerator[str, None]:
        while comments < 2:
            await asyncio.sleep(0)
        yield "data: 1\n\n"
        while comments < 5:
            await asyncio.sleep(0)
        yield "data: 2\n\n"

    stream = EventStream(events(), nothing(), comment_seconds=0.001)
    await stream({"type": "http"}, stay, send)
    start, *bodies, last = sent
    assert start["type"] == "http.response.start" and not last["more_body"]
    text = b"".join(message["body"] for message in bodies).decode()
    assert text.replace(COMMENT, "") == "data: 1\n\ndata: 2\n\n"
    assert text.startswith(COMMENT) and text.count(COMMENT) >= 5


async def test_a_stream_without_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at its late beginning nor while it is silent."""
    monkeypatch.setattr(sse, "SSE_COMMENT_SECONDS", 0.001)
    bodies: list[bytes] = []

    async def deltas() -> AsyncGenerator[Any, None]:
        while not bodies:
            await asyncio.sleep(0)
        yield None, "data: 1\n\n"
        await asyncio.sleep(0.01)
        yield None, "data: 2\n\n"

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    source = deltas()
    first = await first_of(cast(Request, Connected()), source, 0)
    assert not first.done()
    events = stream_events(ADAPTER, first, source)
    stream = EventStream(events, source, first=first, comment_seconds=0)
    await stream({"type": "http"}, stay, send)
    assert b"".join(bodies) == b"data: 1\n\ndata: 2\n\n"


async def test_a_client_that_leaves_a_silent_stream() -> None:
    async def events() -> AsyncGenerator[str, None]:
        await asyncio.Event().wait()
        yield ""

    async def leave() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message["type"] == "http.response.start"

    await EventStream(events(), nothing())({"type": "http"}, leave, send)


class Connected:
    """A request whose client stays."""

    receive = staticmethod(stay)


class Adapter:
    """Writes deltas as they are, and a failure as its message."""

    stream_interval = None
    opens_late = False

    def opening(self) -> list[str]:
        return []

    closing = opening

    def is_new(self, choice: Any, delta: Any) -> bool:
        return True

    def events(self, choice: Any, delta: str) -> list[str]:
        return [delta]

    def failure(self, error: Exception) -> list[str]:
        return [f"data: {{{error}}}\n\n", DONE]


ADAPTER = cast(GenerationAdapter, Adapter())


async def test_a_stream_begins_before_its_first_event_if_that_takes_long() -> None:
    """With a comment at once, and a later failure is an event of the stream."""
    reported = asyncio.Event()
    bodies: list[bytes] = []

    async def deltas() -> AsyncGenerator[Any, None]:
        await reported.wait()
        yield None, "data: 1\n\n"
        raise RequestFailed("the engine is gone")

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))
        if len(bodies) == 2:
            reported.set()

    source = deltas()
    first = await first_of(cast(Request, Connected()), source, 0.001)
    assert not first.done()
    events = stream_events(ADAPTER, first, source)
    stream = EventStream(events, source, first=first, comment_seconds=0.001)
    await stream({"type": "http"}, stay, send)
    start, comment, *rest = bodies
    assert (start, comment) == (b"", COMMENT.encode())
    text = b"".join(rest).decode().replace(COMMENT, "")
    assert text.startswith("data: 1\n\ndata: {") and "the engine is gone" in text
    assert text.endswith(DONE)


async def test_an_early_refusal_is_raised() -> None:
    async def deltas() -> AsyncGenerator[str, None]:
        raise RequestFailed("no")
        yield ""

    with pytest.raises(RequestFailed):
        await first_of(cast(Request, Connected()), deltas())


async def test_a_client_that_leaves_before_the_first_event() -> None:
    """Its source is closed, although the first item is still awaited."""
    closed = False

    async def deltas() -> AsyncGenerator[Any, None]:
        nonlocal closed
        try:
            await asyncio.Event().wait()
            yield None, ""
        finally:
            closed = True

    async def leave() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    source = deltas()
    first = await first_of(cast(Request, Connected()), source, 0.001)
    events = stream_events(ADAPTER, first, source)
    await EventStream(events, source, first=first)({"type": "http"}, leave, send)
    assert closed and first.done()
