"""uvicorn with the protocol of Serve's proxy, on a real socket."""

import asyncio
import json
import socket
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rayfin.deployments.edge import protocol
from rayfin.deployments.edge.protocol import EXPECTED, HttpProtocol, install
from rayfin.deployments.edge.proxy import middlewares
from rayfin.deployments.http.body_limits import MAX_HEAD_BYTES, MAX_URL, SEND_BUFFER_BYTES

pytestmark = [pytest.mark.anyio, pytest.mark.slow(reason="waits for time limits")]
HOST = b"Host: a\r\n"
PATIENCE = 30.0  # seconds; only a failure waits so long


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the path, the names of the headers when the body was there, and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    names = b" ".join(name for name, _ in scope["headers"])
    answer = b"|".join([scope["path"].encode(), names, body])
    headers = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


async def said(port: int, *parts: bytes) -> bytes:
    """All that the server says until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0)
    answer = await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()
    return answer


def check(answer: bytes, status: int, code: str) -> None:
    """One refusal of our form, after which the connection is closed."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("ascii").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert first.startswith(f"http/1.1 {status} ")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code
    assert headers["connection"] == "close" and headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body) and headers["x-request-id"]


def request(line: bytes, headers: bytes = HOST) -> bytes:
    return line + b" HTTP/1.1\r\n" + headers + b"\r\n"


CHUNKED = HOST + b"Transfer-Encoding: chunked\r\n"
INVALID: dict[str, tuple[bytes, ...]] = {
    "8: an unknown method": (request(b"FOO /"),),
    "6: a target that is no path": (request(b"GET @evil"),),
    "27: a length and chunks": (
        request(b"POST /", CHUNKED + b"Content-Length: 3\r\n") + b"0\r\n\r\n",
    ),
    "27: two lengths": (
        request(b"POST /", HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n") + b"abcd",
    ),
    "27: a bad length": (request(b"POST /", HOST + b"Content-Length: -1\r\n"),),
    "27: a bad chunk": (request(b"POST /", CHUNKED) + b"ZZ\r\n",),
    "27: a bad chunk, later": (request(b"POST /", CHUNKED), b"3\r\nabc\r\n", b"ZZ\r\n"),
    "27: a folded header": (request(b"GET /", HOST + b"X: a\r\n b\r\n"),),
    "27: a blank before the colon": (request(b"GET /", HOST + b"X : a\r\n"),),
    "27: a line without a colon": (request(b"GET /", HOST + b"nonsense\r\n"),),
    "35: a control character": (request(b"GET /", HOST + b"X: a\x00b\r\n"),),
    "another protocol": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),),
}


@pytest.mark.parametrize("parts", INVALID.values(), ids=INVALID)
async def test_what_is_no_http_has_an_error_body(listening: Any, parts: tuple[bytes, ...]) -> None:
    async with listening(echo) as port:
        check(await said(port, *parts), 400, "invalid_request")


ENDLESS = b"x" * (4 * MAX_HEAD_BYTES)
TOO_LONG: dict[str, tuple[int, bytes]] = {
    "28: a target": (414, request(b"GET /" + b"x" * (MAX_URL + 1))),
    "28: a target over what the parser can hold": (414, request(b"GET /" + b"x" * 70_000)),
    "28: a target that does not end": (414, b"GET /" + 4 * ENDLESS),
    "28: a header that does not end": (431, b"GET / HTTP/1.1\r\nX: " + 4 * ENDLESS),
    "28: headers that do not end": (431, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200_000),
    "28: a trailer that does not end": (431, request(b"POST /", CHUNKED) + b"0\r\nX: " + ENDLESS),
    "28: a chunk's extension": (431, request(b"POST /", CHUNKED) + b"1;x=" + ENDLESS),
}


@pytest.mark.parametrize(("status", "data"), TOO_LONG.values(), ids=TOO_LONG)
async def test_lines_are_limited_before_they_end(listening: Any, status: int, data: bytes) -> None:
    parts = [data[at : at + 16_384] for at in range(0, len(data), 16_384)]
    async with listening(echo) as port:
        answer = await said(port, *parts)
    check(answer, status, "url_too_long" if status == 414 else "headers_too_large")


async def test_a_client_that_sends_on_still_reads_its_refusal(listening: Any) -> None:
    """Closing at once would reset the connection, and the client would find no answer in it."""
    async with listening(echo) as port:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, b"FOO / HTTP/1.1\r\n")
            for _ in range(50):
                await loop.sock_sendall(connection, ENDLESS)  # a reset would raise here
            answer = b""
            while b"}}" not in answer:
                answer += await loop.sock_recv(connection, 65_536)
    check(answer, 400, "invalid_request")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", None),
        (b"\r\n", None),
        (b"GE", "request_timeout"),
        (b"GET / HTT", "request_timeout"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX:", "request_timeout"),
        (request(b"GET /"), None),
        (request(b"GET /") + b"\r\n", None),
        (request(b"GET /") + b"GET / HTTP/1.1\r\n", "request_timeout"),
    ],
)
async def test_headers_are_waited_for_so_long(
    listening: Any, data: bytes, code: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 29. One byte now and then is not enough to stay."""
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.2)
    async with listening(echo, timeout_keep_alive=1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)

        async def drip() -> None:
            while not writer.is_closing():
                await asyncio.sleep(0.05)
                writer.write(b"x" if data.endswith(b"X:") else b"")

        dripping = asyncio.create_task(drip())
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        dripping.cancel()
        writer.close()
    if data.startswith(request(b"GET /")):
        first, answer = answer[: answer.index(b"/|host|") + 7], answer.partition(b"/|host|")[2]
        assert first.startswith(b"HTTP/1.1 200")
    if code is None:
        assert answer == b""
    else:
        check(answer, 408, code)


async def test_neither_bodies_nor_answers_nor_idling_end_with_the_time_for_headers(
    listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.05)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.2)
        await echo(scope, receive, send)

    async with listening(slow, timeout_keep_alive=60) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(request(b"POST /", HOST + b"Content-Length: 3\r\n"))
            for _ in range(3):
                await asyncio.sleep(0.1)
                writer.write(b"x")
            answer = await asyncio.wait_for(reader.readuntil(b"|xxx"), PATIENCE)
            assert answer.startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.2)
        writer.close()


async def test_pipelined_requests_are_answered_in_order(listening: Any) -> None:
    """Row 33."""
    asked = [request(b"GET /%d" % number) for number in range(100)]
    asked[-1] = request(b"GET /99", HOST + b"Connection: close\r\n")
    async with listening(echo) as port:
        answer = await said(port, b"".join(asked))
    paths = [part.rpartition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK\r\n")]
    assert [path.split(b"|")[0] for path in paths[1:]] == [b"/%d" % each for each in range(100)]


async def test_trailers_are_no_headers(listening: Any) -> None:
    trailed = request(b"POST /", CHUNKED + b"Connection: close\r\n") + b"3\r\nabc\r\n0\r\n"
    async with listening(echo) as port:
        answer = await said(port, trailed + b"Authorization: Bearer x\r\n\r\n")
    assert answer.endswith(b"/|host transfer-encoding connection|abc")


@pytest.mark.parametrize("behind", [b"", request(b"GET /next"), request(b"FOO /")])
async def test_a_client_that_leaves_is_told_of_to_the_request_that_runs(
    listening: Any, behind: bytes
) -> None:
    left = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        leaving = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0)
        assert leaving.result() == {"type": "http.disconnect"}
        left.set()

    async with listening(endless) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b"GET /"))
        await reader.readuntil(b"x")
        writer.write(behind)  # what is no HTTP cuts the answer off: there is no place for another
        if not behind.startswith(b"FOO"):
            writer.close()
        await asyncio.wait_for(left.wait(), PATIENCE)
        writer.close()


async def test_the_kernel_keeps_little_of_an_answer(listening: Any) -> None:
    seen: list[int] = []

    class Seen(HttpProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            connection = transport.get_extra_info("socket")
            seen.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))

    async with listening(echo, http=Seen) as port:
        await said(port, request(b"GET /", HOST + b"Connection: close\r\n"))
    assert seen[0] <= 2 * SEND_BUFFER_BYTES


async def test_websockets_are_still_uvicorns(listening: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "websocket" and (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close"})

    headers = HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    async with listening(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        writer.write(request(b"GET /", headers + key))
        assert b" 101 " in await asyncio.wait_for(reader.readline(), PATIENCE)
        writer.close()


def test_the_place_where_uvicorn_looks_has_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails: read uvicorn's changes, then EXPECTED and what each override calls."""
    monkeypatch.setattr(auto, "AutoHTTPProtocol", HttpToolsProtocol)
    middlewares()  # as Serve calls it
    config = uvicorn.Config(echo, http="auto")
    config.load()
    assert config.http_protocol_class is HttpProtocol
    for name in EXPECTED:
        assert name in vars(HttpToolsProtocol), name
    cycle = HttpToolsProtocol._start_asgi_task.__annotations__["cycle"]
    assert cycle == "RequestResponseCycle"


def test_an_unknown_uvicorn_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = type("Other", (asyncio.Protocol,), {})
    monkeypatch.setattr(auto, "AutoHTTPProtocol", other)
    assert not install() and auto.AutoHTTPProtocol is other
    monkeypatch.setattr(auto, "AutoHTTPProtocol", HttpToolsProtocol)
    monkeypatch.delattr(HttpToolsProtocol, "send_400_response")
    assert not install() and auto.AutoHTTPProtocol is HttpToolsProtocol
