"""Calls of the API inside its process, for programs that have a Serve handle of the ingress."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from pydantic import BaseModel
from starlette.types import ASGIApp, Message

from rayfin.deployments.http.sse import ended

HEADERS = ((b"host", b"rayfin"), (b"content-type", b"application/json"))


class HandleCalls:
    """Posts bodies to an application of this process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """Yields the reply as one value of JSON, or lists of a stream's lines as they come.

        Args:
            body: an object of JSON, or a pydantic model.
        """
        if isinstance(body, BaseModel):
            body = body.model_dump(exclude_none=True)
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        asked = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Message:
            if not asked:
                await asyncio.Event().wait()  # a client that stays until its task is cancelled
            return asked.pop()

        async def send(message: Message) -> None:
            sent.put_nowait(message)

        task = asyncio.ensure_future(self._run(path, receive, send))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        streams, parts = False, [b""]
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    kinds = [value for name, value in message["headers"] if name == b"content-type"]
                    streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
                elif streams and message.get("body"):
                    yield [line + "\n\n" for line in message["body"].decode().split("\n\n") if line]
                else:
                    parts.append(message.get("body", b""))
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    break
            else:
                task.result()
            if not streams:
                yield _value(b"".join(parts))
        finally:
            await ended(task)

    async def _run(self, path: str, receive: Any, send: Any) -> None:
        scope = {
            **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1"},
            **{"method": "POST", "scheme": "http", "path": path, "raw_path": path.encode()},
            **{"query_string": b"", "root_path": "", "client": None, "server": None},
            **{"headers": [*HEADERS], "state": {}},
        }
        await self._app(scope, receive, send)


def _value(text: bytes) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text.decode(errors="replace")
