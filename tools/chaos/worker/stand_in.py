"""An application that answers as the oracle says: what is there before the switch to Rayfin."""

import asyncio
import json
from collections.abc import AsyncIterator

from load import Ask
from oracle import HashOracle
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

TOKEN_SECONDS = 0.01


@serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0})
class StandIn:
    def __init__(self) -> None:
        self._oracle = HashOracle()

    async def __call__(self, request: Request) -> StreamingResponse:
        body = await request.json()
        ask = Ask("", tuple(body["prompt"]), body["max_tokens"], body["seed"])
        return StreamingResponse(self._events(ask), media_type="text/event-stream")

    async def _events(self, ask: Ask) -> AsyncIterator[str]:
        (expected,) = self._oracle.expect([ask])
        (choice,) = expected.choices
        usage = {"prompt_tokens": len(ask.prompt), "completion_tokens": len(choice.tokens)}
        for token in choice.tokens:
            yield event({"choices": [{"index": 0, "text": "", "token_ids": [token]}]})
            await asyncio.sleep(TOKEN_SECONDS)
        last = {"index": 0, "text": choice.text, "finish_reason": choice.finish_reason}
        yield event({"choices": [last], "usage": usage})
        yield "data: [DONE]\n\n"


def event(data: dict[str, object]) -> str:
    return f"data: {json.dumps(data)}\n\n"


app = StandIn.bind()
