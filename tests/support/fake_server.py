"""A small OpenAI server on a real socket."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serves on a free port, by a thread of this process; gives the address."""
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


@dataclass
class FakeServer:
    """Repeats what it heard; "fail" is refused, "error" and "break" end the stream early."""

    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            self.keys.append(request.headers.get("authorization"))
            said = body["messages"][-1]["content"]
            if "fail" in said:
                error = {"message": "The queue is full.", "code": "queue_full"}
                return JSONResponse({"error": error}, 429)
            return StreamingResponse(self._events(said), media_type="text/event-stream")

        return app

    @contextmanager
    def running(self) -> Iterator["FakeServer"]:
        with listening(self.app()) as url:
            self.url = f"{url}/v1"
            yield self

    async def _events(self, said: str) -> AsyncIterator[str]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            yield _event({"role": "assistant", "content": ""})
            for word in ("You ", "said ", said):
                await asyncio.sleep(0.01)
                yield _event({"content": word})
            if "break" in said:
                return
            if "error" in said:
                yield f"data: {json.dumps({'error': {'message': 'The engine died.'}})}\n\n"
            else:
                yield _event({}, "stop")
                usage = {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}
                yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.at_once -= 1


def _event(delta: dict[str, str], finish_reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"
