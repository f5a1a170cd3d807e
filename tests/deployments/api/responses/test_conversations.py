"""/v1/conversations through the openai package: what responses read and add."""

import asyncio
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError

from rayfin.actors.errors import InvalidRequest, RequestFailed
from rayfin.deployments.api.responses.conversations import ConversationState
from rayfin.deployments.api.responses.items import input_items
from rayfin.deployments.api.responses.store import ResponseStore

pytestmark = pytest.mark.anyio
HELLO: Any = [{"role": "user", "content": "hello"}]


async def texts(openai: AsyncOpenAI, conversation_id: str) -> list[str]:
    listed = await openai.conversations.items.list(conversation_id, order="asc")
    return [item.content[0].text async for item in listed]  # type: ignore[union-attr]


async def test_responses_go_on_with_a_conversation(
    openai: AsyncOpenAI, engine: Any, tokenizer: Any
) -> None:
    made = await openai.conversations.create(items=HELLO, metadata={"a": "b"})
    assert made.id.startswith("conv_") and made.metadata == {"a": "b"}
    engine.reply = tokenizer.encode("one", False)
    first = await openai.responses.create(model="tiny", input="you", conversation=made.id)
    assert first.conversation is not None and first.conversation.id == made.id
    assert await texts(openai, made.id) == ["hello", "you", "one"]
    fields: Any = {"model": "tiny", "input": "go", "conversation": {"id": made.id}}
    engine.reply = tokenizer.encode("two", False)
    stream = await openai.responses.create(**fields, stream=True, store=False)
    assert [event async for event in stream][-1].type == "response.completed"
    prompt = tokenizer.decode(engine.seen[-1].prompt, False)
    turns = ("hello", "you", "one", "go")
    assert [prompt.index(text) for text in turns] == sorted(prompt.index(text) for text in turns)
    assert await texts(openai, made.id) == ["hello", "you", "one", "go", "two"]


async def test_a_conversation_has_its_items_before_a_response_has_ended(
    openai: AsyncOpenAI, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the moment in which the store writes them."""
    made = await openai.conversations.create()
    change = ResponseStore.change_conversation
    seen: list[str] = []

    async def slow(store: ResponseStore, *args: Any) -> Any:
        seen.append((await openai.responses.retrieve(reply.id)).status or "")
        return change(store, *args)

    monkeypatch.setattr(ResponseStore, "change_conversation", slow)
    reply = await openai.responses.create(
        model="tiny", input="you", conversation=made.id, background=True
    )
    async with asyncio.timeout(10):
        while (await openai.responses.retrieve(reply.id)).status != "completed":
            await asyncio.sleep(0)
    assert seen == ["in_progress"]
    assert len(await texts(openai, made.id)) == 2


async def test_items_of_a_conversation(openai: AsyncOpenAI) -> None:
    made = await openai.conversations.create()
    added = await openai.conversations.items.create(made.id, items=[*HELLO, *HELLO])
    first, second = added.data
    item = await openai.conversations.items.retrieve(first.id, conversation_id=made.id)
    assert item == first
    await openai.conversations.items.delete(first.id, conversation_id=made.id)
    newest = await openai.conversations.items.list(made.id, limit=1)
    assert [item.id for item in newest.data] == [second.id] and not newest.has_more
    changed = await openai.conversations.update(made.id, metadata={"c": "d"})
    assert changed.metadata == {"c": "d"}
    assert (await openai.conversations.retrieve(made.id)).metadata == {"c": "d"}
    assert (await openai.conversations.delete(made.id)).deleted
    with pytest.raises(NotFoundError):
        await openai.conversations.retrieve(made.id)
    with pytest.raises(NotFoundError):
        await openai.responses.create(model="tiny", input="a", conversation=made.id)


async def test_a_response_that_fails_adds_nothing(openai: AsyncOpenAI, engine: Any) -> None:
    made = await openai.conversations.create(items=HELLO)
    engine.failure = (1, RequestFailed("gone"))
    stream = await openai.responses.create(
        model="tiny", input="you", conversation=made.id, stream=True
    )
    assert [event async for event in stream][-1].type == "response.failed"
    assert await texts(openai, made.id) == ["hello"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": 1}, "conversation"),
        ({"conversation": {"name": "x"}}, "conversation.id"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"conversation": "conv_1"}, "conversation"),
    ],
)
async def test_conversations_that_are_refused(
    http: httpx.AsyncClient, fields: Any, param: str
) -> None:
    error = (await http.post("/v1/responses", json={"input": "a", **fields})).json()["error"]
    assert error["param"] == param
    error = (await http.post("/v1/conversations", json={"items": [{"type": "x"}]})).json()["error"]
    assert error["param"] == "items[0].type"


async def test_conversations_belong_to_a_tenant_and_have_a_size() -> None:
    store = ResponseStore(max_bytes=20_000)
    store.add_conversation(ConversationState("c", "a", {}, input_items("hello")))
    with pytest.raises(InvalidRequest):
        store.conversation("c", "b")
    with pytest.raises(InvalidRequest, match="too large"):
        store.change_conversation("c", "a", {"added": input_items("x" * 20_000)})
    assert len(store.conversation("c", "a").items) == 1
