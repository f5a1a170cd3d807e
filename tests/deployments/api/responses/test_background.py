"""Responses that go on without their client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from rayfin.actors.errors import Overloaded

pytestmark = pytest.mark.anyio
REPLY = "Sure — here you go: 👩‍👩‍👧 مرحبا.\n\nEND of it"
BACKGROUND: dict[str, Any] = {"model": "tiny", "input": "hello", "background": True}


async def until(condition: Callable[[], Any]) -> None:
    """Lets the others run until it holds; only a failure waits so long."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def ended(openai: AsyncOpenAI, response_id: str) -> Any:
    """Polls as clients do."""
    async with asyncio.timeout(10):
        while True:
            reply = await openai.responses.retrieve(response_id)
            if reply.status not in ("queued", "in_progress"):
                return reply
            await asyncio.sleep(0)


@pytest.fixture
async def gate(engine: Any) -> AsyncIterator[asyncio.Event]:
    """The engine starts when it is set."""
    engine.gate = asyncio.Event()
    yield engine.gate
    engine.gate.set()


async def test_it_is_queued_and_then_runs_by_itself(
    openai: AsyncOpenAI, http: httpx.AsyncClient, engine: Any, gate: asyncio.Event
) -> None:
    made = await openai.responses.create(**BACKGROUND)
    assert (made.status, made.background, made.output, made.usage) == ("queued", True, [], None)
    await until(lambda: engine.open)
    assert (await http.get("/load")).json() == {"server_load": 1}
    assert (await openai.responses.retrieve(made.id)).status == "queued"
    gate.set()
    reply = await ended(openai, made.id)
    assert (reply.status, reply.output_text) == ("completed", REPLY)
    assert (await http.get("/load")).json() == {"server_load": 0}


async def test_what_there_is_can_be_read_on_the_way(openai: AsyncOpenAI, engine: Any) -> None:
    engine.pause_after = (5, asyncio.Event())
    made = await openai.responses.create(**BACKGROUND)
    await until(lambda: engine.taken >= 5)
    reply = await openai.responses.retrieve(made.id)
    assert reply.status == reply.output[0].status == "in_progress"
    assert REPLY.startswith(reply.output_text) and reply.usage is None
    engine.pause_after[1].set()
    assert (await ended(openai, made.id)).output_text == REPLY


async def test_a_stream_survives_its_client(
    openai: AsyncOpenAI, http: httpx.AsyncClient, engine: Any
) -> None:
    """The client reads a little, goes away, and comes back for the rest."""
    engine.pause_after = (8, asyncio.Event())
    body = {**BACKGROUND, "stream": True}
    asking = asyncio.create_task(http.post("/v1/responses", json=body))
    await until(lambda: engine.taken >= 8)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert engine.open and not engine.aborted
    (response_id,) = ("resp_" + name.split("_")[1].split("-")[0] for name in engine.open)
    first = asyncio.create_task(listen(openai, response_id, None))
    second = asyncio.create_task(listen(openai, response_id, 6))
    engine.pause_after[1].set()
    everything, rest = await asyncio.gather(first, second)
    assert [event.sequence_number for event in everything] == list(range(len(everything)))
    assert [event.type for event in everything[:4]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert everything[7:] == rest
    assert everything[-1].type == "response.completed"
    assert everything[-1].response.output_text == REPLY
    assert await listen(openai, response_id, 10**6) == []  # there is nothing after the last one


async def listen(openai: AsyncOpenAI, response_id: str, after: int | None) -> list[Any]:
    more: Any = {} if after is None else {"starting_after": after}
    stream = await openai.responses.retrieve(response_id, stream=True, **more)
    return [event async for event in stream]


async def test_a_stream_from_the_start(openai: AsyncOpenAI) -> None:
    stream = await openai.responses.create(**BACKGROUND, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[1].type == "response.queued" and events[-1].response.output_text == REPLY


@pytest.mark.parametrize("begun", [False, True])
async def test_cancel(openai: AsyncOpenAI, engine: Any, begun: bool) -> None:
    engine.pause_after = (5, asyncio.Event())
    made = await openai.responses.create(**BACKGROUND)
    await until(lambda: engine.taken >= (5 if begun else 0))
    listening = asyncio.create_task(listen(openai, made.id, None))
    reply = await openai.responses.cancel(made.id)
    assert reply.status == "cancelled" and reply == await openai.responses.retrieve(made.id)
    assert bool(reply.output_text) == begun and not engine.open
    assert await openai.responses.cancel(made.id) == reply
    last = (await listening)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")


async def test_cancelling_what_has_ended_changes_nothing(openai: AsyncOpenAI) -> None:
    made = await openai.responses.create(**BACKGROUND)
    reply = await ended(openai, made.id)
    assert await openai.responses.cancel(made.id) == reply


async def test_deleting_aborts(openai: AsyncOpenAI, engine: Any, gate: asyncio.Event) -> None:
    made = await openai.responses.create(**BACKGROUND)
    await until(lambda: engine.open)
    await openai.responses.delete(made.id)
    await until(lambda: not engine.open)
    assert len(engine.aborted) == 1


async def test_a_refusal_is_found_later(openai: AsyncOpenAI, engine: Any) -> None:
    engine.refusal = Overloaded("queue is full")
    made = await openai.responses.create(**BACKGROUND)
    reply = await ended(openai, made.id)
    assert (reply.status, reply.output) == ("failed", [])
    assert (reply.error.code, reply.error.message) == ("rate_limit_exceeded", "queue is full")
    events = await listen(openai, made.id, None)
    types = [event.type for event in events]
    assert types == ["response.created", "response.queued", "response.failed"]


async def test_it_cannot_be_continued_before_its_end(
    openai: AsyncOpenAI, http: httpx.AsyncClient, gate: asyncio.Event
) -> None:
    made = await openai.responses.create(**BACKGROUND)
    body = {"input": "on", "previous_response_id": made.id}
    error = (await http.post("/v1/responses", json=body)).json()["error"]
    assert error["param"] == "previous_response_id" and "in progress" in error["message"]
