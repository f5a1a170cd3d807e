"""Many streams at once, and streams whose reader leaves."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

STREAMS = 32
LENGTH = 20
ENDLESS = {"max_tokens": 1500, "ignore_eos": True}


def prompt(number: int) -> str:
    return f"Stream {number} says: " + "tell me more " * (number % 9)


def test_concurrent_streams_equal_their_solo_runs(
    app: Any, greedy: Callable[[str, int], list[int]]
) -> None:
    """Each answer is what it would be alone; lengths differ, so the batch changes all the time."""
    lengths = [LENGTH + 2 * number for number in range(STREAMS)]
    before = app.idle()

    async def read(http: Any, number: int) -> tuple[list[int], str]:
        body = {
            "prompt": prompt(number),
            "temperature": 0,
            "max_tokens": lengths[number],
            "ignore_eos": True,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        reason = ""
        async for event in app.stream(http, body):
            tokens += event["choices"][0]["token_ids"]
            reason = event["choices"][0]["finish_reason"] or reason
        return tokens, reason

    async def read_all() -> list[tuple[list[int], str]]:
        async with app.async_client() as http:
            return await asyncio.gather(*(read(http, number) for number in range(STREAMS)))

    answers = asyncio.run(read_all())
    for number, (tokens, reason) in enumerate(answers):
        assert tokens == greedy(prompt(number), lengths[number]), f"stream {number}"
        assert reason == "length"
    after = app.idle()
    assert after.generation_tokens - before.generation_tokens == sum(lengths)
    assert after.finished["length"] - before.finished.get("length", 0) == STREAMS
    assert after.steps - before.steps < sum(lengths) / 4, "they did not share their steps"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_reader_that_leaves_frees_its_pages(
    app: Any, path: str, choices: int, stream: bool
) -> None:
    before, counted = app.idle(), app.samples()
    body = {"model": app.model, "n": choices, **ENDLESS}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        body["prompt"] = "Hello"

    async def running() -> None:
        while (await app.scheduler().stats.remote()).running < choices:
            await asyncio.sleep(0.02)

    async def leave_stream() -> None:
        async with app.async_client() as http:
            events = app.stream(http, body, path)
            async for _ in events:
                break
            await running()
            await events.aclose()

    async def leave_request() -> None:
        async with app.async_client() as http:
            request = asyncio.create_task(http.post(path, json=body))
            await running()
            assert not request.done()
            request.cancel()

    asyncio.run(leave_stream() if stream else leave_request())
    after = app.idle()
    assert after.finished.get("abort", 0) - before.finished.get("abort", 0) == choices
    assert after.finished.get("length", 0) == before.finished.get("length", 0)
    left = "rayfin_client_disconnects_total"
    assert app.samples()[left] - counted[left] == choices
