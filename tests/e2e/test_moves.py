"""Two engines, one of which drains: its streams go on at the other one."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from rayfin.actors.config import EngineArgs
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.server_args import ServerArgs

LENGTH = 1000
PROMPTS = [f"{number} and {number} are" + " 12 and 30 are 42." * 20 for number in range(4)]
MOVED = "rayfin_request_replays_total/moved"


@pytest.fixture(scope="module")
def pair(deploy: Callable[..., Any], served: str, settings: dict[str, Any]) -> Iterator[Any]:
    server = ServerArgs(data_parallel_size=2, admin_api_key="operator")
    own = {"spare_runners": 0}
    yield deploy(bind_app(server, EngineArgs(**{**settings, **own})), "moves", served, "/moves")
    serve.delete("moves")


def test_streams_leave_an_engine_that_drains(
    pair: Any, greedy: Callable[[str, int], list[int]], eventually: Callable[..., Any]
) -> None:
    key = {"Authorization": "Bearer operator"}

    def engines() -> dict[str, dict[str, Any]]:
        with pair.client() as http:
            listed = http.get("/admin/engines", headers=key).raise_for_status().json()["engines"]
        return {own["engine"]: own for own in listed}

    tokens: list[list[int]] = [[] for _ in PROMPTS]

    async def read(http: httpx.AsyncClient, index: int) -> None:
        body = {"prompt": PROMPTS[index], "temperature": 0, "max_tokens": LENGTH}
        body |= {"ignore_eos": True, "return_token_ids": True}
        async for event in pair.stream(http, body):
            tokens[index] += event["choices"][0]["token_ids"]

    async def read_while_one_drains() -> None:
        async with pair.async_client() as http:
            reading = asyncio.gather(*(read(http, index) for index in range(len(PROMPTS))))
            while not all(len(own) > 20 for own in tokens):
                assert not reading.done()
                await asyncio.sleep(0.01)
            (await http.post("/admin/drain?engine=0", headers=key)).raise_for_status()
            while (await asyncio.to_thread(engines))["0"]["stats"]["running"]:
                await asyncio.sleep(0.05)
            assert all(len(own) < LENGTH for own in tokens), "they ended where they were"
            await reading

    eventually(lambda: len([own for own in engines().values() if own["state"] == "ready"]) == 2, "")
    asyncio.run(read_while_one_drains())
    assert tokens == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    assert pair.samples()[MOVED] >= 1
