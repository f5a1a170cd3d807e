"""A stand-in for Ray Serve between its proxy and a replica, and applications behind it."""

import asyncio
from typing import Any

PIECE = b"x" * 1000


class Serve:
    """ASGI: takes all that the replica says at once, and asks for the body by itself.

    Where the replica fails it answers itself, unless the replica's answer has begun, as Serve does.
    """

    def __init__(self, replica: Any) -> None:
        self._replica = replica
        self.held = self.most_held = 0  # bytes of answers on their way
        self.heard: list[str] = []  # kinds of messages to the replica
        self.said: list[str] = []  # kinds of messages of the replica

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        requests: asyncio.Queue[Any] = asyncio.Queue()
        answers: asyncio.Queue[Any] = asyncio.Queue()
        begun = failed = False

        async def listen() -> None:
            kind = ""
            while kind != "http.disconnect":
                message = await receive()
                kind = message["type"]
                self.heard.append(kind)
                requests.put_nowait(message)

        async def take(message: Any) -> None:
            self.said.append(message["type"])
            self.held += len(message.get("body", b""))
            self.most_held = max(self.most_held, self.held)
            answers.put_nowait(message)

        async def answer() -> None:
            nonlocal failed
            try:
                await self._replica(scope, requests.get, take)
            except Exception:
                failed = True
            answers.put_nowait(None)

        tasks = [asyncio.create_task(listen()), asyncio.create_task(answer())]
        try:
            while (message := await answers.get()) is not None:
                begun = begun or message["type"] == "http.response.start"
                await send(message)
                self.held -= len(message.get("body", b""))
            if failed and not begun:
                await send({"type": "http.response.start", "status": 500, "headers": []})
                await send({"type": "http.response.body", "body": b"failed"})
        finally:
            for task in tasks:
                task.cancel()


class Stream:
    """ASGI: a start and as many pieces, unless the client leaves first."""

    def __init__(self, pieces: int) -> None:
        self.left = asyncio.Event()
        self.sent = 0  # pieces
        self._pieces = pieces

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def leaving() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()

        listening = asyncio.create_task(leaving())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(self._pieces):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            self.sent += 1
            await asyncio.sleep(0)
            if self.left.is_set():
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        listening.cancel()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """ASGI: answers with the request's body."""
    got = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": got["body"]})
