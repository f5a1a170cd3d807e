"""Jobs over HTTP: when tokens came, how many, and what went wrong."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx

from rayfin.deployments.bench.client import run_jobs
from rayfin.deployments.bench.measures import Timeline
from rayfin.deployments.bench.workload import Job


class Stream(httpx.AsyncByteStream):
    def __init__(self, events: list[dict[str, object]], done: bool = True) -> None:
        self._lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._lines += ["data: [DONE]\n\n"] if done else []

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for line in self._lines:
            await asyncio.sleep(0)
            yield line.encode()


def text(count: int) -> dict[str, object]:
    return {"choices": [{"text": "x"}], "usage": {"completion_tokens": count}}


def answer(request: httpx.Request) -> httpx.Response:
    body = json.loads(request.content)
    assert body["ignore_eos"] and body["stream"] and body["temperature"] == 0
    assert body["max_tokens"] == 3
    match body["prompt"][0]:
        case 1:  # text that lags behind its tokens: only the count tells
            silent: dict[str, object] = {"choices": [{"text": ""}]}
            silent["usage"] = {"completion_tokens": 1}
            return httpx.Response(200, stream=Stream([silent, text(3)]))
        case 2:  # a server that does not count as it goes
            event: dict[str, object] = {"choices": [{"text": "x"}]}
            return httpx.Response(200, stream=Stream([event] * 3))
        case 3:
            return httpx.Response(429, json={"error": {"message": "queue is full"}})
        case 4:
            return httpx.Response(200, stream=Stream([text(1)], done=False))
        case 5:
            return httpx.Response(200, stream=Stream([text(2)]))
        case 6:
            return httpx.Response(200, stream=Stream([{"error": {"message": "oh"}}]))
    raise httpx.ConnectError("no")


def run(*first_tokens: int, max_concurrency: int | None = None) -> list[Timeline]:
    async def go() -> list[Timeline]:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x/v1") as client:
            jobs = [Job((token, 9), 3) for token in first_tokens]
            return await run_jobs(client, "m", jobs, max_concurrency=max_concurrency)

    return asyncio.run(go())


def test_tokens_are_counted_when_they_come() -> None:
    counted, texts = run(1, 2)
    assert [count for _, count in counted.pieces] == [1, 2]
    assert [count for _, count in texts.pieces] == [1, 1, 1]
    assert counted.error is texts.error is None
    assert counted.prompt_tokens == 2 and counted.ttft <= counted.e2el


def test_failures_are_noted() -> None:
    assert [own.error for own in run(3, 4, 5, 6, 7)] == [
        "HTTP 429: queue is full",
        "the stream broke off before its end",
        "received 2 of 3 tokens",
        "oh",
        "cannot connect",
    ]


def test_no_more_run_at_once_than_may() -> None:
    timelines = run(1, 1, 1, max_concurrency=1)
    for before, after in zip(timelines, timelines[1:], strict=False):
        assert before.pieces[-1][0] <= after.sent
