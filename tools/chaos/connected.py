"""A program on the cluster with streams past HTTP, while the processes under it are killed."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from batch import kill_one, record_of
from cluster import APP
from nemesis import Nemesis
from oracle import sampling_of

from rayfin import AsyncLLM, RequestOutputKind, connect

VICTIMS = ("scheduler", "runner")
KILL_SECONDS = 4.0  # between two kills


def connected_under_kills(streams: int, kills: int) -> Callable[[Nemesis], Awaitable[None]]:
    """Kills a scheduler or runner ``kills`` times under a program with so many open streams."""

    async def act(nemesis: Nemesis) -> None:
        async with await connect(APP, nemesis.cluster.model) as client:
            killed = asyncio.Event()

            async def reader() -> None:
                while not killed.is_set():
                    await stream_one(nemesis, client)

            readers = [asyncio.create_task(reader()) for _ in range(streams)]
            for number in range(kills):
                await asyncio.sleep(KILL_SECONDS)
                await kill_one(nemesis, VICTIMS[number % len(VICTIMS)])
            killed.set()
            await asyncio.gather(*readers)

    return act


async def stream_one(nemesis: Nemesis, client: AsyncLLM) -> None:
    """One stream, whose pieces are joined into the record that the checker reads."""
    ask = nemesis.load.asks.line(longest=400)
    params = sampling_of(ask)
    params.output_kind = RequestOutputKind.DELTA
    tokens: list[int] = []
    text, reason, started = "", None, time.monotonic()
    async for output in client.generate({"prompt_token_ids": list(ask.prompt)}, params):
        tokens += output.outputs[0].token_ids
        text += output.outputs[0].text
        reason = output.outputs[0].finish_reason
    choice = {"index": 0, "token_ids": tokens, "text": text, "finish_reason": reason}
    usage = {"prompt_tokens": len(ask.prompt), "completion_tokens": len(tokens)}
    answer = {"status_code": 200, "body": {"choices": [choice], "usage": usage}}
    record = record_of(ask, {"response": answer})
    record.started = started
    nemesis.load.records.append((ask, record))
