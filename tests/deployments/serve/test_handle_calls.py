"""Handle methods over an application of this process."""

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from rayfin.deployments.serve.handle_calls import HandleCalls


class Body(BaseModel):
    text: str
    stream: bool | None = None


def application(left: asyncio.Event) -> FastAPI:
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, Any]:
        return {"got": await request.json()}

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        async def lines() -> Any:
            try:
                yield "data: 1\n\ndata: 2\n\n"
                yield "data: [DONE]\n\n"
                await asyncio.sleep(60)
            finally:
                left.set()

        return StreamingResponse(lines(), media_type="text/event-stream")

    @app.post("/fail")
    async def fail() -> None:
        raise KeyError("a mistake")

    return app


def test_a_reply_is_one_value_and_a_stream_lists_of_lines() -> None:
    async def work() -> None:
        left = asyncio.Event()
        calls = HandleCalls(application(left))
        assert [part async for part in calls.post("/echo", {"a": 1})] == [{"got": {"a": 1}}]
        whole = [part async for part in calls.post("/echo", Body(text="x"))]
        assert whole == [{"got": {"text": "x"}}]
        (missing,) = [part async for part in calls.post("/none", {})]
        assert missing == {"detail": "Not Found"}
        stream = calls.post("/stream", {})
        assert await anext(stream) == ["data: 1\n\n", "data: 2\n\n"]
        assert await anext(stream) == ["data: [DONE]\n\n"]
        await stream.aclose()
        await asyncio.wait_for(left.wait(), 5)
        assert await anext(calls.post("/fail", {})) == "Internal Server Error"

    asyncio.run(work())
