"""An operator's commands on a real engine: the tokens stay right."""

import asyncio
from collections.abc import Callable
from typing import Any

LENGTH = 1500
PROMPT = "The engine sleeps, and says: " * 3


def test_a_stream_goes_on_after_a_sleep(app: Any, greedy: Callable[[str, int], list[int]]) -> None:
    app.idle()
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}

    async def read() -> list[int]:
        tokens: list[int] = []
        async with app.async_client() as http:
            async for event in app.stream(http, body | {"return_token_ids": True}):
                if not tokens:
                    await asyncio.to_thread(sleep_and_wake)
                tokens += event["choices"][0]["token_ids"]
        return tokens

    def sleep_and_wake() -> None:
        asleep = app.manage("sleep")
        assert asleep["state"] == "asleep" and asleep["stats"]["pages_held"] == 0
        assert asleep["stats"]["waiting"] == 1, "it was over too soon"
        with app.client() as http:
            refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_asleep"
        assert app.manage("wake")["state"] == "ready"

    assert asyncio.run(read()) == greedy(PROMPT, LENGTH)
    app.idle()


def test_a_cache_that_was_reset_is_empty(app: Any) -> None:
    def cached() -> int:
        with app.client() as http:
            usage = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).json()
        return int(usage["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    app.manage("cache/reset")
    assert cached() == 0
