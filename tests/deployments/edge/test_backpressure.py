"""The two ends of the window, with a stand-in for Serve between them, and a real socket.

By Serve and by a lane: those that Serve carries are tested with lanes off.
"""

import asyncio
from typing import Any

import pytest

from rayfin.deployments.edge import backpressure, reply_socket
from rayfin.deployments.edge.backpressure import OFFER, PASSED, TAKEN, ProxyFlow, ReplicaFlow
from rayfin.deployments.http.body_limits import SEND_BUFFER_BYTES, WINDOW_BYTES
from serve_stand_in import PIECE, Serve, Stream
from serve_stand_in import echo as body

pytestmark = [pytest.mark.anyio, pytest.mark.slow(reason="waits for time limits")]
PATIENCE = 30.0  # seconds; only a failure waits so long
GET = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
EXPECT = b"Host: a\r\nContent-Length: 3\r\nExpect: 100-Continue\r\nConnection: close\r\n\r\n"


async def refusal(scope: Any, receive: Any, send: Any) -> None:
    """ASGI: wants no body."""
    await send({"type": "http.response.start", "status": 413, "headers": []})
    await send({"type": "http.response.body", "body": b"no"})


START = {"type": "http.response.start", "status": 200, "headers": []}


class Client:
    """What an exchange sends, the client takes."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    async def send(self, message: Any) -> None:
        self.taken.append(message)
        await asyncio.sleep(0)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.taken)


def exchange_with(client: Client) -> backpressure._Exchange:
    return backpressure._Exchange(asyncio.Event().wait, client.send, PATIENCE, asked=True)  # type: ignore[arg-type]


async def test_pieces_leave_together_up_to_a_bound() -> None:
    """A reader that is slow must take each message in time, so none is long."""
    client = Client()
    exchange = exchange_with(client)
    exchange.arrived(reply_socket.START, START)
    for _ in range(200):
        exchange.arrived(reply_socket.BODY, PIECE)
    exchange.arrived(reply_socket.END, b"")
    await asyncio.wait_for(exchange.send({PASSED: True, "type": ""}), PATIENCE)
    sizes = [len(message["body"]) for message in client.taken[1:]]
    assert client.body == 200 * PIECE and 2 < len(sizes) < 20
    assert max(sizes) <= backpressure.JOIN_BYTES


async def test_the_end_of_a_second_answer_does_not_end_the_first() -> None:
    client = Client()
    exchange = exchange_with(client)
    assert exchange.arrived(reply_socket.START, START)
    assert not exchange.arrived(reply_socket.START, START)
    ends = asyncio.create_task(exchange.send({PASSED: True, "type": "http.response.start"}))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not ends.done()
    exchange.arrived(reply_socket.END, b"first")
    await asyncio.wait_for(ends, PATIENCE)
    assert client.body == b"first"


async def test_an_answer_that_broke_off_before_its_start_left_is_begun_again() -> None:
    client = Client()
    exchange = exchange_with(client)
    exchange.arrived(reply_socket.START, START)
    exchange.arrived(reply_socket.BODY, b"first")
    exchange.lost()
    assert exchange.arrived(reply_socket.START, START)
    exchange.arrived(reply_socket.END, b"second")
    await asyncio.wait_for(exchange.send({PASSED: True, "type": ""}), PATIENCE)
    assert len(client.taken) == 2 and client.body == b"second"


async def test_an_answer_that_serve_has_begun_takes_no_pieces() -> None:
    client = Client()
    exchange = exchange_with(client)
    await exchange.send({"type": "http.response.start", "status": 200, "headers": []})
    assert not exchange.arrived(reply_socket.START, START)
    await exchange.send({"type": "http.response.body", "body": b"whole"})
    assert len(client.taken) == 2 and client.body == b"whole"


@pytest.mark.parametrize(("sent", "lost_first"), [(True, True), (True, False), (False, False)])
async def test_a_second_answer_that_comes_too_late_does_not_hold_the_client(
    sent: bool, lost_first: bool
) -> None:
    """Serve hears of a disconnect, by which it ends the second; its end does not wait."""
    exchange = exchange_with(Client())
    exchange.arrived(reply_socket.START, START)
    if sent:
        for _ in range(20):
            await asyncio.sleep(0)
    if lost_first:
        exchange.lost()
    assert not exchange.arrived(reply_socket.START, START)
    if not lost_first:
        exchange.lost()
    heard = await asyncio.wait_for(exchange.receive(), PATIENCE)
    assert heard["type"] == "http.disconnect"
    await asyncio.wait_for(exchange.send({PASSED: True, "type": ""}), PATIENCE)
    exchange.close()


FULL = WINDOW_BYTES * 2 // 5  # what is held when nothing is taken, at the least
ENOUGH = 16 * WINDOW_BYTES // len(PIECE)  # pieces, many times what kernels keep of small windows
MOST_AHEAD = WINDOW_BYTES + 2 * SEND_BUFFER_BYTES + 2**20  # of a client: sockets hold some


@pytest.mark.parametrize("lanes", [True, False])
@pytest.mark.parametrize("slow", [True, False])
async def test_all_of_a_long_answer_arrives(
    listening: Any, slow: bool, lanes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick client costs few calls; each read of a slow one is reported."""
    if slow:
        monkeypatch.setattr(backpressure, "SLOW_READER_SECONDS", -1.0)
    serve = Serve(ReplicaFlow(Stream(ENOUGH)))
    async with listening(ProxyFlow(serve, with_lanes=lanes)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
    assert answer.count(PIECE) == ENOUGH and answer.endswith(b"0\r\n\r\n")
    reported = serve.heard.count(TAKEN)
    # Pieces that have come by a lane meanwhile leave together.
    assert reported > (20 if lanes else 100) if slow else 16 <= reported <= 40
    assert serve.most_held <= WINDOW_BYTES


@pytest.mark.parametrize("lanes", [True, False])
async def test_a_client_that_takes_nothing_counts_as_gone(listening: Any, lanes: bool) -> None:
    """Row 31. Little waits for it meanwhile, and one that reads slowly is left alone."""
    stream = Stream(10**9)
    serve = Serve(ReplicaFlow(stream))
    async with listening(ProxyFlow(serve, seconds=0.3, with_lanes=lanes)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writer.write(GET)
        for _ in range(3):
            assert await reader.read(1000)
            assert not stream.left.is_set()
        await asyncio.wait_for(stream.left.wait(), PATIENCE)
        writer.close()
    if lanes:
        assert FULL <= stream.sent * len(PIECE) <= MOST_AHEAD
    else:
        assert FULL <= serve.most_held <= WINDOW_BYTES


@pytest.mark.parametrize("lanes", [True, False])
@pytest.mark.parametrize("reset", [True, False])
async def test_a_client_that_leaves_while_its_stream_waits(
    listening: Any, reset: bool, lanes: bool
) -> None:
    stream = Stream(10**9)
    serve = Serve(ReplicaFlow(stream))
    async with listening(ProxyFlow(serve, with_lanes=lanes)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writer.write(GET)
        while (stream.sent * len(PIECE) if lanes else serve.held) < FULL:
            await asyncio.sleep(0)
        if reset:
            writer.transport.abort()
        writer.close()
        await asyncio.wait_for(stream.left.wait(), PATIENCE)


async def test_an_application_without_the_layer_is_told_nothing(listening: Any) -> None:
    serve = Serve(Stream(ENOUGH))
    async with listening(ProxyFlow(serve)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
    assert answer.count(PIECE) == ENOUGH
    assert TAKEN not in serve.heard


async def test_without_the_proxys_end_nothing_waits(listening: Any) -> None:
    serve = Serve(ReplicaFlow(Stream(ENOUGH)))
    async with listening(serve) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"Host", OFFER.encode() + b": {}\r\nHost"))  # no header offers it
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
    assert answer.count(PIECE) == ENOUGH


@pytest.mark.parametrize(
    ("app", "heads"),
    [
        (ReplicaFlow(body), [b"HTTP/1.1 100 Continue", b"HTTP/1.1 200 OK"]),
        (ReplicaFlow(refusal), [b"HTTP/1.1 413 Content Too Large"]),
        (body, [b"HTTP/1.1 100 Continue", b"HTTP/1.1 200 OK"]),
        (refusal, [b"HTTP/1.1 413 Content Too Large"]),
    ],
    ids=["asks", "refuses", "asks without the layer", "refuses without the layer"],
)
async def test_continue_is_said_when_the_application_asks(
    listening: Any, app: Any, heads: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 34. An application that cannot tell is not waited for."""
    with_layer = isinstance(app, ReplicaFlow)
    monkeypatch.setattr(
        backpressure, "CONTINUE_SECONDS", 3600 if with_layer or app is refusal else 0.1
    )
    async with listening(ProxyFlow(Serve(app))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\n" + EXPECT)
        said = b""
        for head in heads:
            reported = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
            assert reported.startswith(head[:13])
            if head.startswith(b"HTTP/1.1 100"):
                writer.write(b"abc")
        said = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
    assert (b"abc" in said) == (len(heads) == 2)
