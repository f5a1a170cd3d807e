"""Answers past Serve: a stand-in for Serve between the two ends, real sockets around them."""

import asyncio
import errno
import os
import socket
from typing import Any

import httpx
import pytest

from rayfin.actors.transport import channel
from rayfin.actors.transport.async_channel import AsyncChannel
from rayfin.actors.transport.channel import Acceptor
from rayfin.deployments.edge import backpressure, reply_socket
from rayfin.deployments.edge.backpressure import BODY, LANE, OFFER, ProxyFlow, ReplicaFlow
from rayfin.deployments.edge.reply_socket import Landing, Lane, Lanes
from serve_stand_in import PIECE, Serve, Stream, echo

pytestmark = pytest.mark.anyio
PATIENCE = 30.0  # seconds; only a failure waits so long
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n"
END = b"0\r\n\r\n"
START = {"type": "http.response.start", "status": 200, "headers": []}


class Collected:
    """A stream of a landing that keeps what arrives."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, Any]] = []
        self.news = asyncio.Event()
        self.broken = False

    def arrived(self, kind: int, data: Any) -> bool:
        if kind == reply_socket.START and self.pieces:
            return False
        self.pieces.append((kind, data))
        self.news.set()
        return True

    def lost(self) -> None:
        self.broken = True
        self.news.set()

    async def until(self, pieces: int) -> None:
        while len(self.pieces) < pieces and not self.broken:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), PATIENCE)


def piece(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def connected() -> tuple[Landing, Lane]:
    landing = Landing()
    found = await Lanes().find(landing.address())
    assert found is not None
    return landing, found


async def until_broken(own: Lane) -> None:
    while not own.broken:
        await asyncio.sleep(0)


def break_off(own: Lane) -> None:
    """Closes a lane as a process that dies does."""
    own._channel._transport.close()


async def settle() -> None:
    """Lets all that has been written be read."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_what_streams_say_in_one_turn_is_one_write() -> None:
    landing, own = await connected()
    streams = [Collected() for _ in range(32)]
    numbers = [landing.expect(stream) for stream in streams]
    writes: list[bytes] = []
    through = own._channel._transport.write
    counted = type("Counted", (), {"write": lambda _, data: writes.append(data)})()
    own._channel._transport = counted
    for at, number in enumerate(numbers):
        own.put(number, START)
        own.put(number, piece(b"%d" % at))
        own.put(number, piece(b"", more=False))
    await asyncio.sleep(0)
    assert len(writes) == 1
    for byte in writes[0]:  # however a read cuts them
        through(bytes([byte]))
    for at, stream in enumerate(streams):
        await stream.until(3)
        kinds = [kind for kind, _ in stream.pieces]
        assert kinds == [reply_socket.START, reply_socket.BODY, reply_socket.END]
        assert stream.pieces[0][1] == START
        assert stream.pieces[1][1] == b"%d" % at


async def test_a_number_that_names_no_stream_reaches_none() -> None:
    landing, own = await connected()
    stream = Collected()
    number = landing.expect(stream)
    for named, body in ((number ^ 1, b"forged"), (number, b"own")):
        own.put(named, START)
        own.put(named, piece(body))
    await stream.until(2)
    assert stream.pieces[1] == (reply_socket.BODY, b"own")
    landing.forget(number)
    own.put(number, piece(b"late"))
    other = Collected()
    own.put(landing.expect(other), START)
    await other.until(1)
    assert len(stream.pieces) == 2


async def test_a_process_of_another_user_is_not_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of ``Acceptor`` have the other end."""
    address, user = Landing().address(), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert await Lanes().find(address) is None


async def test_a_proxy_that_closes_gets_no_answers() -> None:
    assert await Lanes().find(Acceptor(lambda connected: None, "closes").address()) is None


async def test_a_proxy_that_says_nothing_gets_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve carries them; a later request tries again."""
    monkeypatch.setattr(reply_socket, "LANE_WELCOME_SECONDS", 0.05)
    landing, lanes = Landing(), Lanes()
    with monkeypatch.context() as silent:
        silent.setattr(AsyncChannel, "send", lambda channel, message: None)
        assert await lanes.find(landing.address()) is None
    monkeypatch.setattr(reply_socket, "LANE_WELCOME_SECONDS", PATIENCE)
    assert await lanes.find(landing.address()) is not None


async def test_requests_at_once_share_one_connection() -> None:
    address, lanes = Landing().address(), Lanes()
    found = await asyncio.gather(*(lanes.find(address) for _ in range(8)))
    assert found[0] is not None and len(set(found)) == 1 and not lanes._connecting


async def test_without_file_descriptors_a_later_request_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(socket, name)

        def socket(self, *_: Any) -> Any:
            raise OSError(errno.EMFILE, "too many open files")

    landing, lanes = Landing(), Lanes()
    with monkeypatch.context() as full:
        full.setattr(channel, "socket", Full())
        assert not landing.address()
    address = landing.address()
    with monkeypatch.context() as full:
        full.setattr(channel, "socket", Full())
        assert await lanes.find(address) is None
    assert await lanes.find(address) is not None


async def test_of_two_answers_to_a_request_the_first_is_taken() -> None:
    """Serve may send a request to a second replica, with the same number."""
    landing = Landing()
    address = landing.address()
    first, second = await Lanes().find(address), await Lanes().find(address)
    assert first is not None and second is not None
    stream = Collected()
    number = landing.expect(stream)
    first.put(number, START)
    await stream.until(1)
    second.put(number, START)
    second.put(number, piece(b"second"))
    second.put(number, piece(b"", more=False))
    second.cut(number)
    await settle()
    break_off(second)
    await settle()
    assert len(stream.pieces) == 1 and not stream.broken
    first.put(number, piece(b"first", more=False))
    await stream.until(2)
    assert stream.pieces[1] == (reply_socket.END, b"first")


async def test_a_lane_that_breaks_is_replaced_and_both_ends_hear_of_it() -> None:
    landing, lanes = Landing(), Lanes()
    address = landing.address()
    own = await lanes.find(address)
    assert own is not None and own is await lanes.find(address)
    begun, other = Collected(), Collected()
    number = landing.expect(begun)
    landing.expect(other)
    heard: list[bool] = []
    own.watch(number, lambda: heard.append(True))
    own.put(number, START)
    await begun.until(1)
    break_off(own)
    await asyncio.wait_for(until_broken(own), PATIENCE)
    await begun.until(2)
    assert begun.broken and not other.broken and heard == [True]
    fresh = await lanes.find(address)
    assert fresh is not None and fresh is not own and not fresh.broken


async def test_serve_carries_what_no_lane_can(listening: Any) -> None:
    """A replica on another machine finds no proxy at the address."""

    class Elsewhere(Serve):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            _, number = scope["extensions"][OFFER][LANE]
            scope["extensions"][OFFER][LANE] = ("rayfin-of-another-machine", number)
            await super().__call__(scope, receive, send)

    serve = Elsewhere(ReplicaFlow(Stream(10)))
    async with listening(ProxyFlow(serve)) as port, httpx.AsyncClient() as client:
        for _ in range(2):
            answer = await client.get(f"http://127.0.0.1:{port}/")
            assert answer.content == 10 * PIECE
    assert serve.said.count("http.response.body") == 2 * 11


async def test_serve_carries_only_the_end_and_hears_of_no_disconnect(listening: Any) -> None:
    """Else it would cancel requests that are over; the connection is used again."""
    stream = Stream(10)
    serve = Serve(ReplicaFlow(stream))
    async with listening(ProxyFlow(serve)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(GET)
            answer = await asyncio.wait_for(reader.readuntil(END), PATIENCE)
            assert answer.startswith(b"HTTP/1.1 200") and answer.count(PIECE) == 10
        writer.close()
    assert not stream.left.is_set()
    assert serve.said == 3 * ["http.response.start", "http.response.body"]
    assert serve.most_held == 0 and set(serve.heard) == {"http.request"}


@pytest.mark.parametrize("begun", [True, False])
async def test_an_answer_that_fails(listening: Any, begun: bool) -> None:
    """One that has begun is cut off, and nothing of another answer follows it."""

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send(START)
            await send(piece(b"half"))
        raise RuntimeError

    async with listening(ProxyFlow(Serve(ReplicaFlow(fails)))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
    if begun:
        assert answer.startswith(b"HTTP/1.1 200") and not answer.endswith(END)
        assert answer.count(b"HTTP/1.1") == 1 and b"failed" not in answer
    else:
        assert answer.startswith(b"HTTP/1.1 500") and b"failed" in answer


async def test_a_replica_that_dies_cuts_its_answers_off(listening: Any) -> None:
    replica = ReplicaFlow(Stream(10**9))
    serve, read = Serve(replica), asyncio.Event()

    async def dying(scope: Any, receive: Any, send: Any) -> None:
        serving = asyncio.create_task(replica(scope, receive, asyncio.Queue[Any]().put))
        await asyncio.wait_for(read.wait(), PATIENCE)
        (own,) = replica._lanes._lanes.values()
        break_off(own)
        serving.cancel()
        raise RuntimeError

    serve._replica = dying
    async with listening(ProxyFlow(serve)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        answer = await asyncio.wait_for(reader.read(1000), PATIENCE)
        read.set()
        answer += await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200") and not answer.endswith(END)
    assert answer.count(b"HTTP/1.1") == 1


async def test_a_whole_answer_arrives_though_its_replica_dies(listening: Any) -> None:
    """Serve then says that the request failed, and has not heard of its end."""
    pieces = 10**4

    async def dying(scope: Any, receive: Any, send: Any) -> None:
        address, number = scope["extensions"][OFFER][LANE]
        own = await Lanes().find(address)
        assert own is not None
        own.put(number, START)
        for _ in range(pieces):
            own.put(number, piece(PIECE))
        own.put(number, piece(b"", more=False))
        while not exchanges[0]._landed.complete:
            await asyncio.sleep(0)
        raise RuntimeError

    exchanges: list[Any] = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        exchanges.append(receive.__self__)
        await Serve(dying)(scope, receive, send)

    async with listening(ProxyFlow(noted)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
        writer.write(GET)
        answer = await asyncio.wait_for(reader.readuntil(END), PATIENCE)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(PIECE) == pieces


async def test_a_request_that_comes_twice_to_one_replica_is_answered_once(listening: Any) -> None:
    """By a lane; Serve carries the other answer, which is dropped."""
    calls = 0

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await send(START)
            await send(piece(b"first"))
            while calls == 1:
                await asyncio.sleep(0)
            await settle()
            await send(piece(b"", more=False))
        else:
            await send(START)
            await send(piece(b"second"))
            await asyncio.Event().wait()

    replica, read = ReplicaFlow(application), asyncio.Event()

    async def twice(scope: Any, receive: Any, send: Any) -> None:
        def again() -> dict[str, Any]:
            return {**scope, "extensions": dict(scope["extensions"])}

        first = asyncio.create_task(replica(again(), receive, send))
        await asyncio.wait_for(read.wait(), PATIENCE)
        second = asyncio.create_task(replica(again(), receive, send))
        await first
        second.cancel()

    async with listening(ProxyFlow(twice)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await asyncio.wait_for(reader.readuntil(b"first"), PATIENCE)
        read.set()
        answer = await asyncio.wait_for(reader.readuntil(END), PATIENCE)
        writer.close()
    assert answer == b"\r\n" + END


async def test_a_client_that_leaves_ends_its_stream(listening: Any) -> None:
    stream = Stream(10**9)
    async with listening(ProxyFlow(Serve(ReplicaFlow(stream)))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await asyncio.wait_for(reader.read(1000), PATIENCE)
        writer.close()
        await asyncio.wait_for(stream.left.wait(), PATIENCE)


@pytest.mark.parametrize("apart", [True, False])
async def test_a_short_body_travels_with_the_first_lines(
    listening: Any, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it comes a moment later; Serve's own way of it is not waited for."""
    monkeypatch.setattr(backpressure, "SHORT_BODY_SECONDS", PATIENCE)

    class Slow(Serve):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            self.offered = scope["extensions"][OFFER].get(BODY)

            async def never() -> Any:
                await asyncio.Event().wait()

            await super().__call__(scope, never, send)

    serve = Slow(ReplicaFlow(echo))
    async with listening(ProxyFlow(serve)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST if apart else POST + b"abc")
        if apart:
            await asyncio.sleep(0.05)
            writer.write(b"abc")
        answer = await asyncio.wait_for(reader.readuntil(END), PATIENCE)
        writer.close()
    assert b"abc" in answer and serve.offered["body"] == b"abc"


async def test_a_body_that_came_twice_is_read_once(listening: Any) -> None:
    heard: list[Any] = []

    async def listens(scope: Any, receive: Any, send: Any) -> None:
        heard.append(await receive())
        await send(START)
        await send(piece(b"on"))
        heard.append(await receive())

    async with listening(ProxyFlow(Serve(ReplicaFlow(listens)))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"abc")
        await asyncio.wait_for(reader.readuntil(b"on"), PATIENCE)
        writer.close()
        while len(heard) < 2:
            await asyncio.sleep(0.01)
    assert [message["type"] for message in heard] == ["http.request", "http.disconnect"]
    assert heard[0]["body"] == b"abc"


async def test_a_replica_without_the_layer_gets_the_body_from_serve(listening: Any) -> None:
    async with listening(ProxyFlow(Serve(echo))) as port, httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{port}/", content=b"abc")
    assert answer.content == b"abc"


@pytest.mark.parametrize("size", [backpressure.SHORT_BODY_BYTES, backpressure.SHORT_BODY_BYTES + 1])
async def test_a_long_body_comes_by_serve(listening: Any, size: int) -> None:
    offers: list[Any] = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        offers.append(scope["extensions"][OFFER].get(BODY))
        await Serve(ReplicaFlow(echo))(scope, receive, send)

    async with listening(ProxyFlow(noted)) as port, httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{port}/", content=b"a" * size)
    assert len(answer.content) <= size
    assert offers == [None] or size == backpressure.SHORT_BODY_BYTES
