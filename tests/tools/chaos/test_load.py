"""What clients write down of servers that answer, refuse, break off and fall silent."""

import asyncio
import json

import pytest
from history import Record, check, collected
from load import Ask, Asks, Load
from oracle import HashOracle

REFUSAL = json.dumps({"error": {"message": "no", "type": "server_error", "code": "queue_full"}})


def head(status: str, body: str = "", kind: str = "application/json") -> bytes:
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{length}Connection: close\r\n\r\n{body}"
    ).encode()


def chunk(tokens: list[int], text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": tokens, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


async def delivered(
    *parts: bytes,
    silent: bool = False,
    leave: bool = False,
    rest: dict[str, list[bytes]] | None = None,
) -> tuple[Ask, Record]:
    """What a client writes down of a server that sends ``parts`` and closes the connection.

    Asked again with an id of ``rest`` it sends what is there instead.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        ids = [line[15:] for line in head.splitlines() if line.startswith("Last-Event-ID: ")]
        for part in (rest or {})[ids[0]] if ids else parts:
            writer.write(part)
            await writer.drain()
        if not silent:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    load = Load(
        f"http://127.0.0.1:{port}", "m", Asks(1), patience=0.2 if silent else 60, resumes=bool(rest)
    )
    ask = load.asks.long_prompt(4)
    async with load.running(0, 0):
        task = load.start(ask)
        if leave:
            while not load.records or not load.records[0][1].events:
                await asyncio.sleep(0.01)
            task.cancel()
        elif not silent:
            await task
    server.close()
    return load.records[0]


def kinds(ask: Ask, record: Record) -> list[str]:
    (expected,) = HashOracle().expect([ask])
    return [violation.kind for violation in check(record, expected, record.started + 1)]


@pytest.fixture(scope="module")
def answer() -> list[bytes]:
    """The right answer, in two events and a last one."""
    ask = Asks(1).long_prompt(4)
    (expected,) = HashOracle().expect([ask])
    (choice,) = expected.choices
    half = len(choice.text) // 2
    return [
        head("200 OK", kind="text/event-stream"),
        chunk(choice.tokens[:9], choice.text[:half]),
        chunk(choice.tokens[9:], choice.text[half:], "length"),
        b"data: [DONE]\n\n",
    ]


def test_an_answer(answer: list[bytes]) -> None:
    ask, record = asyncio.run(delivered(*answer))
    assert record.answered and kinds(ask, record) == []


def test_a_refusal() -> None:
    ask, record = asyncio.run(delivered(head("429 Too Many Requests", REFUSAL)))
    assert (record.failed, record.error, kinds(ask, record)) == (True, "queue_full", [])


def test_an_error_without_a_body() -> None:
    ask, record = asyncio.run(delivered(head("500 Internal Server Error", "oh")))
    assert record.failed and kinds(ask, record) == ["unclear"]


def test_a_connection_that_breaks_off(answer: list[bytes]) -> None:
    ask, record = asyncio.run(delivered(*answer[:2]))
    assert record.failed and record.broken and kinds(ask, record) == []


def test_a_stream_that_never_ends_is_no_client_that_left(answer: list[bytes]) -> None:
    ask, record = asyncio.run(delivered(*answer[:2], silent=True))
    assert record.failed and kinds(ask, record) == ["open"]


def test_a_client_that_leaves(answer: list[bytes]) -> None:
    ask, record = asyncio.run(delivered(*answer[:2], silent=True, leave=True))
    assert record.left and kinds(ask, record) == []


def test_a_stream_that_is_gone_on_with(answer: list[bytes]) -> None:
    first = [answer[0], b"id: a:9\n" + answer[1]]
    ask, record = asyncio.run(delivered(*first, rest={"a:9": [answer[0], *answer[2:]]}))
    assert record.answered and record.again == 1 and kinds(ask, record) == []


def test_a_rest_that_says_something_again(answer: list[bytes]) -> None:
    first = [answer[0], b"id: a:9\n" + answer[1]]
    ask, record = asyncio.run(delivered(*first, rest={"a:9": answer}))
    assert kinds(ask, record) == ["duplicated"]


def test_a_chat_that_calls_a_tool_is_written_as_text() -> None:
    """A name once, then its arguments in pieces; an end may have no delta."""
    call = {"index": 0, "id": "call_1", "function": {"name": "plan", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    deltas = [({"content": "So. "}, None), ({"tool_calls": [call]}, None)]
    deltas += [({"tool_calls": [rest]}, None), ({}, "tool_calls")]
    parts = [head("200 OK", kind="text/event-stream")]
    for delta, reason in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "token_ids": [5]}
        parts.append(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    _, record = asyncio.run(delivered(*parts, b"data: [DONE]\n\n"))
    (answer,) = collected(record.events, 1)
    assert (answer.text, answer.called) == ("So. ", '<plan>{"a": 1}')
    assert answer.finish_reason == "tool_calls"
    assert (answer.tokens, answer.calls) == ([5, 5, 5, 5], ["call_1"])


def test_forms_are_drawn_only_where_asked() -> None:
    plain, forms = Asks(1), Asks(1, forms=True)
    assert all(ask.form is None for ask in (plain.stream() for _ in range(50)))
    drawn = [forms.stream() for _ in range(50)]
    assert {ask.path for ask in drawn} == {"/v1/completions", "/v1/chat/completions"}
    for ask in drawn:
        assert bool(ask.question) != bool(ask.prompt)
        assert ask.n == 1 or ask.settings["temperature"]
        assert ("tools" in ask.body("m")) == bool(ask.question)


def test_pictures_are_drawn_only_where_asked() -> None:
    assert not any(Asks(1).stream().pictures for _ in range(20))
    asks = Asks(1, images=True)
    drawn = [asks.stream() for _ in range(60)] + [asks.short() for _ in range(20)]
    looking = [ask for ask in drawn if ask.pictures]
    assert len(looking) > 30 and {len(ask.pictures) for ask in looking} == {1, 2}
    assert {ask.stream for ask in looking} == {True, False}
    assert all(ask.question and not ask.calls and ask.form is None for ask in looking)
    (message,) = looking[0].body("m")["messages"]
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["image_url"] * len(looking[0].pictures) + ["text"]
    assert "tools" not in looking[0].body("m")
    seen = {number for ask in looking for number in ask.pictures}
    new = [asks.looking(new=True).pictures for _ in range(3)]
    assert len({*new}) == 3 and not seen & {number for (number,) in new}
