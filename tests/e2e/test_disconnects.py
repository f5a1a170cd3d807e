"""A storm of clients that leave at any moment, around others that stay."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from ray import serve

from rayfin import LLM, SamplingParams
from rayfin.actors.config import EngineArgs
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.server_args import ServerArgs

PAIRS = 100  # of one client that stays and one that leaves
PATH = "/v1/completions"
PROMPTS = [f"Storm {number}: " + "count the rain " * (number % 4) for number in range(10)]
LENGTH = 40  # tokens of an answer that is read to its end
# Tokens: more than are sampled until the server hears that a client has left, by a minute's worth.
ENDLESS = 20_000
SETTINGS: dict[str, Any] = {
    "hf_overrides": {"max_position_embeddings": ENDLESS + 480},
    "kv_cache_memory": 256 * 1024**2,
}
NAME = "storm"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
MOMENTS = ["upload", "first byte", "whole", "middle", "end"]
FILES, TASKS = 12, 2  # more than before: what Ray opens and starts by itself


class Leaver:
    """A client that closes its socket, or resets it, at a moment of its answer."""

    def __init__(self, app: Any, chance: random.Random) -> None:
        self.moment = chance.choice(MOMENTS)
        last = self.moment == "end"
        self._tokens = LENGTH - chance.randrange(3) if last else chance.randrange(1, LENGTH)
        self._wait = chance.uniform(0, 1)  # seconds
        self._reset = chance.random() < 0.5
        self._url = urlsplit(app.url)
        content = json.dumps(
            {
                "model": app.model,
                "prompt": chance.choice(PROMPTS),
                "max_tokens": LENGTH if last else ENDLESS,
                "stream": self.moment != "whole",
                "return_token_ids": True,
                **GREEDY,
            }
        )
        self._data = (
            f"POST {self._url.path}{PATH} HTTP/1.1\r\nHost: rayfin\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n{content}"
        ).encode()
        if self.moment == "upload":
            self._data = self._data[: chance.randrange(1, len(self._data))]

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        try:
            writer.write(self._data)
            await writer.drain()
            if self.moment in ("middle", "end"):
                assert b" 200 " in await reader.readline()
                await self._read(reader)
            else:
                await asyncio.sleep(self._wait)
        finally:
            if self._reset:
                writer.transport.abort()
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        tokens = 0
        while tokens < self._tokens:  # a lease brings several in one event
            line = await reader.readline()
            assert line, "the server closed the connection"
            if line.startswith(b"data: {"):
                tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def app(deploy: Callable[..., Any], served: str, settings: dict[str, Any]) -> Iterator[Any]:
    """The demo model with a longer context, in which answers can be endless."""
    application = bind_app(ServerArgs(), EngineArgs(**settings | SETTINGS))
    yield deploy(application, NAME, served, f"/{NAME}")
    serve.delete(NAME)


@pytest.fixture(scope="module")
def alone(solo: LLM) -> dict[str, tuple[str, list[int]]]:
    """prompt -> text and tokens of its answer when nothing else runs."""
    params = SamplingParams(max_tokens=LENGTH, **GREEDY)
    outputs = [solo.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS]
    return {p: (out.text, out.token_ids) for p, out in zip(PROMPTS, outputs, strict=True)}


def test_a_storm_of_disconnects_hurts_nobody(
    app: Any,
    alone: dict[str, tuple[str, list[int]]],
    held: Callable[[], dict[str, tuple[int, int]]],
    eventually: Callable[..., Any],
) -> None:
    """Who stays is answered as if alone, and of those who left nothing is left."""

    async def stay(http: Any, prompt: str, start: float) -> tuple[str, list[int]]:
        await asyncio.sleep(start)
        body = {"prompt": prompt, "max_tokens": LENGTH, "return_token_ids": True, **GREEDY}
        choices = [event["choices"][0] async for event in app.stream(http, body, PATH)]
        assert choices[-1]["finish_reason"] == "length"
        tokens = [token for choice in choices for token in choice["token_ids"]]
        return "".join(choice["text"] for choice in choices), tokens

    async def leave(leaver: Leaver, start: float) -> None:
        await asyncio.sleep(start)
        await leaver.run()

    async def look() -> None:
        """The counts can see a stream: it is tasks of both."""
        async with app.async_client() as http:
            events = app.stream(http, {"prompt": "Hello", "max_tokens": ENDLESS, **GREEDY}, PATH)
            await anext(events)
            open_now = await asyncio.to_thread(held)
            assert all(open_now[name][1] > tasks for name, (_, tasks) in holding.items())
            await events.aclose()

    async def storm() -> Counter[str]:
        """What a storm adds to the counters of requests that finished."""
        leavers = [Leaver(app, chance) for _ in range(PAIRS)]
        stayers = [chance.choice(PROMPTS) for _ in range(PAIRS)]
        starts = [chance.uniform(0, 0.5) for _ in range(PAIRS)]
        moments.update(leaver.moment for leaver in leavers)
        before = await asyncio.to_thread(app.idle)
        async with app.async_client() as http:
            leaving = asyncio.gather(*map(leave, leavers, starts))
            answers = await asyncio.gather(
                *(stay(http, *each) for each in zip(stayers, starts, strict=True))
            )
            await leaving
        assert answers == [alone[prompt] for prompt in stayers]
        after = await asyncio.to_thread(app.idle)
        return Counter(after.finished) - Counter(before.finished)

    with app.client() as http:  # whatever Ray opens for the first request is there
        http.post(PATH, json={"prompt": "Hello", "max_tokens": 1}).raise_for_status()
    app.idle()
    holding = held()
    asyncio.run(look())
    chance, moments = random.Random(27), Counter[str]()
    grown = asyncio.run(storm())
    assert min(moments[moment] for moment in MOMENTS) > 10
    assert grown["error"] == 0
    assert PAIRS <= grown["length"] <= PAIRS + moments["end"]
    assert grown["abort"] >= moments["middle"]

    def let_go() -> bool:
        now = held()
        return all(
            now[name][0] <= files + FILES and now[name][1] <= tasks + TASKS
            for name, (files, tasks) in holding.items()
        )

    eventually(let_go, "the proxy and the ingress hold what they held before")
    with app.client() as http:
        assert http.get("/load").json() == {"server_load": 0}
