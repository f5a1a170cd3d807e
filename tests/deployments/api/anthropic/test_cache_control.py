"""Marks of ``cache_control`` pin what is before them."""

from typing import Any

import httpx
import pytest

from rayfin.actors.errors import MediaUnavailable
from rayfin.actors.messages import Pin
from rayfin.deployments.api.anthropic import messages
from rayfin.deployments.generation.prompts import chat_prompt
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def text(said: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **mark}


def body(system: Any = "be brief", mark: Any = None, **fields: Any) -> dict[str, Any]:
    """Three messages; ``mark`` is on the first."""
    messages = [
        {"role": "user", "content": [text("hello", **(mark or {}))]},
        {"role": "assistant", "content": "world"},
        {"role": "user", "content": [text("of tokens")]},
    ]
    return {"max_tokens": 2, "system": system, "messages": messages, **fields}


async def pinned(http: httpx.AsyncClient, engine: Any, asked: dict[str, Any]) -> Pin | None:
    assert (await http.post("/v1/messages", json=asked)).is_success
    pin: Pin | None = engine.seen[-1].pin
    return pin


async def test_a_mark_pins_what_is_before_it(
    http: httpx.AsyncClient, engine: Any, tokenizer: Tokenizer
) -> None:
    assert await pinned(http, engine, body()) is None
    whole = engine.seen[-1].prompt.tolist()

    async def shown(asked: dict[str, Any]) -> tuple[str, float]:
        pin = await pinned(http, engine, asked)
        assert pin is not None and engine.seen[-1].prompt.tolist() == whole
        return tokenizer.decode(whole[: pin.tokens], False), pin.seconds

    everything = tokenizer.decode(whole, False)
    first, seconds = await shown(body(mark=MARK))
    assert first.endswith("user\nhello<|im_end|>\n") and seconds == 300
    assert everything.startswith(first) and first != everything
    system, seconds = await shown(body([text("be brief", **HOUR)]))
    assert system.endswith("be brief<|im_end|>\n<|im_start|>user\n") and seconds == 3600
    assert await shown(body(**MARK)) == (everything, 300)
    last = body([text("be brief", **HOUR)], mark=MARK)
    last["messages"][2]["content"][0] |= HOUR
    assert await shown(last) == (everything, 3600)


async def test_what_is_before_a_mark_counts_as_created(
    http: httpx.AsyncClient, engine: Any
) -> None:
    async def counts(asked: dict[str, Any]) -> tuple[int, int, int]:
        usage = (await http.post("/v1/messages", json=asked)).json()["usage"]
        read = usage["cache_read_input_tokens"]
        return usage["input_tokens"], usage["cache_creation_input_tokens"], read

    unmarked = await counts(body())
    prompt = len(engine.seen[-1].prompt)
    pages = prompt // 4 * 4 - 2  # all prompts are cached, without a mark too
    assert unmarked == (prompt - 2 - pages, pages, 2)
    marked = await counts(body(mark=MARK))
    created = engine.seen[-1].pin.tokens - 2
    assert marked == (prompt - 2 - created, created, 2)
    assert await counts(body(**MARK)) == (prompt - 2 - pages, pages, 2)


async def test_a_mark_on_a_tool(http: httpx.AsyncClient, engine: Any) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    pin = await pinned(http, engine, body(None, tools=[{**tool, **MARK}]))
    assert pin is not None and 0 < pin.tokens < len(engine.seen[-1].prompt)


async def test_a_part_that_cannot_be_read_again_pins_nothing(
    http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*args: Any, **settings: Any) -> Any:
        if settings.get("add_generation_prompt") is False:
            raise MediaUnavailable("its server does not answer", "messages[0].content[0]")
        return await chat_prompt(*args, **settings)

    monkeypatch.setattr(messages, "chat_prompt", gone)
    assert await pinned(http, engine, body(mark=MARK)) is None


@pytest.mark.parametrize(
    ("mark", "param"),
    [
        ("x", "messages[0].content[0].cache_control"),
        ({}, "messages[0].content[0].cache_control.type"),
        ({"type": "forever"}, "messages[0].content[0].cache_control.type"),
        ({"type": "ephemeral", "ttl": "2h"}, "messages[0].content[0].cache_control.ttl"),
        ({"type": "ephemeral", "ttl": 5}, "messages[0].content[0].cache_control.ttl"),
    ],
)
async def test_bad_marks(http: httpx.AsyncClient, engine: Any, mark: Any, param: str) -> None:
    response = await http.post("/v1/messages", json=body(mark={"cache_control": mark}))
    assert response.status_code == 400 and not engine.seen
    assert param in response.json()["error"]["message"]
