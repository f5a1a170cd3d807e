"""/v1/responses through the openai package: what a client asks for and what it gets."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from rayfin.actors.errors import Overloaded, RequestFailed
from rayfin.actors.messages import EngineInfo

pytestmark = pytest.mark.anyio
LOGPROBS = "message.output_text.logprobs"
REPLY = "Sure — here you go: 👩‍👩‍👧 مرحبا.\n\nEND of it"
TYPES = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def kinds(events: list[Any]) -> list[str]:
    """The types of events, neighbours that are alike as one."""
    types = [event.type for event in events]
    return [kind for i, kind in enumerate(types) if types[i - 1 : i] != [kind]]


def chat(tokenizer: Any, *messages: tuple[str, str]) -> list[int]:
    plain = [{"role": role, "content": content} for role, content in messages]
    ids: list[int] = tokenizer.inner.apply_chat_template(
        plain, add_generation_prompt=True, return_dict=False
    )
    return ids


async def until(condition: Callable[[], Any]) -> None:
    """Lets the others run until it holds; only a failure waits so long."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_a_whole_response(openai: AsyncOpenAI, engine: Any, tokenizer: Any) -> None:
    reply = await openai.responses.create(
        model="tiny",
        input="hello",
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.9,
        metadata={"topic": "tests"},
        user="me",
    )
    assert reply.id.startswith("resp_") and (reply.object, reply.model) == ("response", "org/tiny")
    assert (reply.status, reply.output_text, reply.error) == ("completed", REPLY, None)
    (message,) = reply.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (reply.temperature, reply.top_p, reply.metadata) == (0.5, 0.9, {"topic": "tests"})
    assert (reply.instructions, reply.user, reply.tools) == ("Be brief.", "me", [])
    expected = chat(tokenizer, ("system", "Be brief."), ("user", "hello"))
    request = engine.seen[0]
    assert request.prompt.tolist() == expected
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.9)
    assert request.stopping.max_tokens == 128 - len(expected)  # fills the context
    assert reply.usage.input_tokens == len(expected)
    assert reply.usage.output_tokens == len(engine.reply) + 1
    assert reply.usage.total_tokens == len(expected) + len(engine.reply) + 1
    assert reply.usage.input_tokens_details.cached_tokens == 2


async def test_a_limit_makes_it_incomplete(openai: AsyncOpenAI, engine: Any) -> None:
    reply = await openai.responses.create(model="tiny", input="hello", max_output_tokens=4)
    assert reply.status == "incomplete" and reply.output[0].status == "incomplete"
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert engine.seen[0].stopping.max_tokens == 4 == reply.usage.output_tokens


async def test_the_events_of_a_stream(openai: AsyncOpenAI) -> None:
    stream = await openai.responses.create(model="tiny", input="hello", stream=True)
    events = [event async for event in stream]
    assert kinds(events) == TYPES
    assert [event.sequence_number for event in events] == list(range(len(events)))
    created, in_progress, item_added, part_added, *deltas = events[:-4]
    text_done, part_done, item_done, completed = events[-4:]
    assert len(deltas) > 3 and "".join(event.delta for event in deltas) == REPLY
    assert created.response.status == in_progress.response.status == "in_progress"
    assert created.response.output == [] and created.response.usage is None
    assert (item_added.item.status, item_added.item.content) == ("in_progress", [])
    assert part_added.part.text == ""
    assert text_done.text == part_done.part.text == item_done.item.content[0].text == REPLY
    assert completed.response.output_text == REPLY and completed.response.usage.output_tokens
    ids = {event.item_id for event in (part_added, *deltas, text_done, part_done)}
    assert ids == {item_added.item.id, item_done.item.id, completed.response.output[0].id}
    assert item_done.item.status == completed.response.status == "completed"


async def test_the_package_gathers_a_stream(openai: AsyncOpenAI) -> None:
    async with openai.responses.stream(model="tiny", input="hello") as stream:
        final = await stream.get_final_response()
    assert final.output_text == REPLY


async def test_a_stream_that_meets_its_limit(openai: AsyncOpenAI) -> None:
    stream = await openai.responses.create(
        model="tiny", input="hello", max_output_tokens=2, stream=True
    )
    events = [event async for event in stream]
    assert kinds(events) == [*TYPES[:-1], "response.incomplete"]
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


async def test_an_empty_answer_has_its_events(openai: AsyncOpenAI, engine: Any) -> None:
    engine.reply = []
    stream = await openai.responses.create(model="tiny", input="hello", stream=True)
    events = [event async for event in stream]
    assert kinds(events) == TYPES
    assert [event.delta for event in events if event.type.endswith("delta")] == [""]
    assert events[-1].response.output_text == ""


@pytest.mark.parametrize("top", [None, 0, 2])
async def test_log_probabilities(
    openai: AsyncOpenAI, engine: Any, tokenizer: Any, top: int | None
) -> None:
    """Of every token, the last one included, whole, streamed and read again."""
    wanted: Any = {"model": "tiny", "input": "hello", "include": [LOGPROBS]}
    if top is not None:
        wanted["top_logprobs"] = top
    reply = await openai.responses.create(**wanted)
    reported = reply.output[0].content[0].logprobs
    tokens = [*engine.reply, engine.eos]
    assert [own.token for own in reported] == [tokenizer.token_text(token) for token in tokens]
    assert b"".join(bytes(own.bytes) for own in reported[:-1]).decode() == REPLY
    assert reply.top_logprobs == engine.seen[0].sampling.logprobs == (top or 0)
    likeliest = [(5, -0.25), (6, -0.5)][: top or 0]
    for own in reported:
        assert -10 <= own.logprob < 0
        assert [(other.token, other.logprob) for other in own.top_logprobs] == [
            (tokenizer.token_text(token), logprob) for token, logprob in likeliest
        ]
    again = await openai.responses.retrieve(reply.id, include=[LOGPROBS])
    assert again.output[0].content[0].logprobs == reported

    engine.lease = 3
    stream = await openai.responses.create(**wanted, stream=True)
    events = [event async for event in stream]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    text_done, part_done, item_done, completed = events[-4:]
    reported = completed.response.output[0].content[0].logprobs
    assert [own.token for own in reported] == [tokenizer.token_text(token) for token in tokens]
    assert [own.token for event in deltas for own in event.logprobs] == [
        own.token for own in reported
    ]
    assert "".join(event.delta for event in deltas) == REPLY
    assert len(text_done.logprobs) == len(tokens)
    assert len(part_done.part.logprobs) == len(tokens)
    assert item_done.item.content[0].logprobs == reported
    following = await openai.responses.create(
        model="tiny", input="on", previous_response_id=reply.id
    )
    assert following.output[0].content[0].logprobs == []


async def test_log_probabilities_are_told_where_they_are_included(
    openai: AsyncOpenAI, engine: Any
) -> None:
    reply = await openai.responses.create(
        model="tiny", input="hi", top_logprobs=3, include=["reasoning.encrypted_content"]
    )
    assert reply.output[0].content[0].logprobs == [] and reply.top_logprobs == 3
    assert engine.seen[0].sampling.logprobs is None


async def test_messages_as_input(openai: AsyncOpenAI, engine: Any, tokenizer: Any) -> None:
    first = await openai.responses.create(model="tiny", input="hello", max_output_tokens=3)
    items: list[Any] = [
        {"role": "developer", "content": "obey"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *first.output,
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("go", "on")]},
    ]
    await openai.responses.create(model="tiny", input=items, max_output_tokens=3)
    assert engine.seen[1].prompt.tolist() == chat(
        tokenizer,
        ("system", "obey"),
        ("user", "hello"),
        ("assistant", first.output_text),
        ("user", "go\non"),
    )


async def test_a_conversation_by_reference(
    openai: AsyncOpenAI, engine: Any, tokenizer: Any
) -> None:
    """Instructions are of one response only; the rest is carried on."""
    limit: Any = {"model": "tiny", "max_output_tokens": 2}
    first = await openai.responses.create(input="hello", instructions="One.", **limit)
    second = await openai.responses.create(
        input="world", previous_response_id=first.id, instructions="Two.", **limit
    )
    await openai.responses.delete(first.id)
    third = await openai.responses.create(input="go", previous_response_id=second.id, **limit)
    assert third.previous_response_id == second.id
    names = [request.session and request.session.name for request in engine.seen]
    assert names == [None, first.id, first.id]
    texts = (first.output_text, second.output_text)
    assert engine.seen[1].prompt.tolist() == chat(
        tokenizer, ("system", "Two."), ("user", "hello"), ("assistant", texts[0]), ("user", "world")
    )
    turns = [("user", "hello"), ("assistant", texts[0]), ("user", "world"), ("assistant", texts[1])]
    assert engine.seen[2].prompt.tolist() == chat(tokenizer, *turns, ("user", "go"))
    listed = await openai.responses.input_items.list(third.id, order="asc")
    assert [(item.role, item.content[0].text) for item in listed.data] == [*turns, ("user", "go")]


async def test_truncation(openai: AsyncOpenAI, engine: Any, tokenizer: Any) -> None:
    """As much of the end as leaves room for the output; nothing is cut without being asked."""
    items: list[Any] = []
    for i in range(12):
        items += [{"role": "user", "content": f"question {i}"}]
        items += [{"role": "assistant", "content": f"answer {i}"}]
    items.append({"role": "user", "content": "last"})
    with pytest.raises(BadRequestError) as error:
        await openai.responses.create(model="tiny", input=items)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    for room in (20, 60):
        reply = await openai.responses.create(
            model="tiny", input=items, truncation="auto", max_output_tokens=room, instructions="Be."
        )
        assert reply.truncation == "auto"
        prompt = engine.seen[-1].prompt.tolist()
        kept = [
            chat(tokenizer, ("system", "Be."), *((m["role"], m["content"]) for m in items[start:]))
            for start in range(0, len(items), 2)
        ]
        assert prompt == next(ids for ids in kept if len(ids) + room <= 128)
    assert len(engine.seen) == 2
    alone: Any = [{"role": "user", "content": "a b c " * 100}]
    with pytest.raises(BadRequestError):
        await openai.responses.create(model="tiny", input=[*items, *alone], truncation="auto")


async def test_retrieve_and_delete(openai: AsyncOpenAI) -> None:
    made = await openai.responses.create(model="tiny", input="hello", metadata={"a": "b"})
    assert await openai.responses.retrieve(made.id) == made
    stream = await openai.responses.retrieve(made.id, stream=True, starting_after=5)
    events = [event async for event in stream]
    assert events[0].sequence_number == 6 and events[-1].response == made
    await openai.responses.delete(made.id)
    for call in (openai.responses.retrieve, openai.responses.delete, openai.responses.cancel):
        with pytest.raises(NotFoundError) as error:
            await call(made.id)
        assert (error.value.param, error.value.code) == ("response_id", "not_found")


async def test_what_is_not_stored_is_not_found(openai: AsyncOpenAI, stored: Any) -> None:
    made = await openai.responses.create(model="tiny", input="hello", store=False)
    stream = await openai.responses.create(model="tiny", input="hello", store=False, stream=True)
    assert [event async for event in stream]
    assert made.status == "completed" and len(stored) == 0
    with pytest.raises(NotFoundError):
        await openai.responses.retrieve(made.id)
    with pytest.raises(NotFoundError) as error:
        await openai.responses.create(model="tiny", input="on", previous_response_id=made.id)
    assert error.value.param == "previous_response_id"


async def test_pages_of_input_items(openai: AsyncOpenAI) -> None:
    items: Any = [{"role": "user", "content": text} for text in "abcde"]
    made = await openai.responses.create(model="tiny", input=items, max_output_tokens=1)
    newest_first = [item async for item in openai.responses.input_items.list(made.id, limit=2)]
    assert [item.content[0].text for item in newest_first] == list("edcba")
    page = await openai.responses.input_items.list(made.id, limit=2, order="asc")
    assert page.has_more and (page.first_id, page.last_id) == tuple(i.id for i in page.data)


async def test_only_background_responses_can_be_cancelled(openai: AsyncOpenAI) -> None:
    made = await openai.responses.create(model="tiny", input="hello")
    with pytest.raises(BadRequestError):
        await openai.responses.cancel(made.id)


async def test_input_tokens(openai: AsyncOpenAI, engine: Any) -> None:
    asked: Any = {"model": "tiny", "input": "hello", "instructions": "Be brief."}
    counted = await openai.responses.input_tokens.count(**asked)
    made = await openai.responses.create(**asked)
    assert counted.input_tokens == made.usage.input_tokens and len(engine.seen) == 1
    long = await openai.responses.input_tokens.count(model="tiny", input="a b " * 500)
    assert long.input_tokens > 1000  # more than the context holds


async def test_a_refusal_has_its_status(openai: AsyncOpenAI, engine: Any, stored: Any) -> None:
    engine.refusal = Overloaded("queue is full")
    for stream in (False, True):
        with pytest.raises(Exception, match="queue is full") as error:
            await openai.responses.create(model="tiny", input="hello", stream=stream)
        assert getattr(error.value, "status_code", None) == 429
    assert len(stored) == 0


@pytest.mark.parametrize("failure", [RequestFailed("row failed"), OSError("/etc/secret")])
async def test_a_failure_in_a_stream_is_its_last_event(
    openai: AsyncOpenAI, engine: Any, failure: Exception
) -> None:
    engine.failure = (3, failure)
    stream = await openai.responses.create(model="tiny", input="hello", stream=True)
    events = [event async for event in stream]
    assert kinds(events) == [*TYPES[:5], "response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert "secret" not in failed.error.message and not engine.open
    assert await openai.responses.retrieve(failed.id) == failed


async def test_ignored_fields_are_named(http: httpx.AsyncClient) -> None:
    body = {"input": "hello", "foo": 1, "n": 1, "text": {"verbosity": "low"}}
    response = await http.post("/v1/responses", json=body)
    assert response.headers["x-rayfin-ignored-fields"] == "foo,text.verbosity"


async def test_sampling_fields_of_vllm(http: httpx.AsyncClient, engine: Any) -> None:
    body = {"input": "hello", "top_k": 5, "min_p": 0.1, "seed": 7, "stop": "go", "priority": 3}
    reply = (await http.post("/v1/responses", json=body)).json()
    request = engine.seen[0]
    assert (request.sampling.top_k, request.sampling.min_p, request.priority) == (5, 0.1, 3)
    assert reply["status"] == "completed"
    assert reply["output"][0]["content"][0]["text"] == REPLY[: REPLY.index("go")]


async def test_leaving_aborts(http: httpx.AsyncClient, engine: Any, stored: Any) -> None:
    engine.gate = asyncio.Event()
    for stream in (False, True):
        body = {"input": "hello", "stream": stream}
        task = asyncio.create_task(http.post("/v1/responses", json=body))
        await until(lambda: engine.open)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.open
    assert len(engine.aborted) == 2 and len(stored) == 0


async def test_a_stream_that_is_left_is_cancelled(
    openai: AsyncOpenAI, http: httpx.AsyncClient, engine: Any
) -> None:
    """What it had said is stored; the gate stays closed."""
    engine.pause_after = (5, asyncio.Event())
    body = {"input": "hello", "stream": True}
    asking = asyncio.create_task(http.post("/v1/responses", json=body))
    await until(lambda: engine.taken >= 5)
    (response_id,) = ("resp_" + name.split("_")[1].split("-")[0] for name in engine.open)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not engine.open and len(engine.aborted) == 1
    left = await openai.responses.retrieve(response_id)
    assert (left.status, left.output[0].status) == ("cancelled", "incomplete")
    assert left.output_text and REPLY.startswith(left.output_text)


async def test_raw_messages(http: httpx.AsyncClient, engine: Any, tokenizer: Any) -> None:
    """vLLM's: what the model has read and written, at the end, also from the store."""
    body = {"input": "hello", "enable_response_messages": True}
    reply = (await http.post("/v1/responses", json=body)).json()
    prompt = engine.seen[0].prompt.tolist()
    said = [*engine.reply, engine.eos]
    assert reply["input_messages"] == [
        {
            "type": "raw_message_tokens",
            "message": tokenizer.decode(prompt, False),
            "tokens": prompt,
        }
    ]
    assert reply["output_messages"] == [
        {"type": "raw_message_tokens", "message": tokenizer.decode(said, False), "tokens": said}
    ]
    assert (await http.get(f"/v1/responses/{reply['id']}")).json() == reply
    text = (await http.post("/v1/responses", json={**body, "stream": True})).text
    assert text.count('"output_messages":[{') == 1
    refused = await http.post("/v1/responses", json={**body, "background": True})
    assert refused.json()["error"]["param"] == "enable_response_messages"
    plain = (await http.post("/v1/responses", json={"input": "hello"})).json()
    assert plain["input_messages"] is None and plain["output_messages"] is None


async def test_a_compaction_is_one_message(
    openai: AsyncOpenAI, http: httpx.AsyncClient, engine: Any, service: Any, tokenizer: Any
) -> None:
    """The summary's prompt goes on where the conversation ended; the message may stand for it."""
    service.max_model_len = 1024
    engine.limits = EngineInfo("engine", 1024, tokenizer.vocab_size, 1000, 4)
    first = await openai.responses.create(model="tiny", input="hello", max_output_tokens=3)
    before = tokenizer.decode(engine.seen[-1].prompt, False).removesuffix("assistant\n")
    compacted = await openai.responses.compact(
        model="tiny", previous_response_id=first.id, extra_body={"max_output_tokens": 5}
    )
    prompt = tokenizer.decode(engine.seen[-1].prompt, False)
    assert prompt.startswith(before) and "Summarise this" in prompt.removeprefix(before)
    assert compacted.object == "response.compaction" and compacted.usage.output_tokens == 5
    (message,) = compacted.output
    said = tokenizer.decode(engine.reply[:5], False)
    assert message.content[0].text == f"Summary of the conversation so far:\n\n{said.strip()}"
    items: Any = [*compacted.output, {"role": "user", "content": "on"}]
    await openai.responses.create(model="tiny", input=items, max_output_tokens=3)
    assert "Summary of the conversation" in tokenizer.decode(engine.seen[-1].prompt, False)
    long = await http.post("/v1/responses/compact", json={"input": "x" * 9999})
    assert long.status_code == 400


async def test_a_compaction_of_a_conversation(
    openai: AsyncOpenAI, http: httpx.AsyncClient, engine: Any, service: Any, tokenizer: Any
) -> None:
    """A small context has room for both; the conversation stays; no summary is an error."""
    service.max_model_len = 1024
    engine.limits = EngineInfo("engine", 1024, tokenizer.vocab_size, 1000, 4)
    made = await openai.conversations.create(items=[{"role": "user", "content": "hello"}])
    body = {"conversation": made.id}
    assert (await http.post("/v1/responses/compact", json=body)).status_code == 200
    assert "hello" in tokenizer.decode(engine.seen[-1].prompt, False)
    assert len((await openai.conversations.items.list(made.id)).data) == 1
    engine.reply = []
    assert (await http.post("/v1/responses/compact", json=body)).status_code == 500
