"""The load generator's own transport, against uvicorn and against sockets that misbehave."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from rayfin.deployments.bench.client import WireTransport, wire_transport

pytestmark = pytest.mark.anyio
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Server:
    """Reads requests and answers each with the next of ``answers``; "" closes the connection."""

    def __init__(self, *answers: list[bytes]) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self.ended = asyncio.Event()  # a client has closed its connection
        self._answers = list(answers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while not reader.at_eof():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            size = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self.requests.append(head + await reader.readexactly(int(size or 0)))
            for part in self._answers.pop(0):
                if not part:
                    writer.close()
                    return
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
        self.ended.set()
        writer.close()

    @asynccontextmanager
    async def client(self, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        base = f"http://127.0.0.1:{port}/v1"
        async with (
            server,
            httpx.AsyncClient(base_url=base, transport=WireTransport(), **settings) as client,
        ):
            yield client


async def lines(client: httpx.AsyncClient, body: Any = None) -> list[str]:
    async with client.stream("POST", "/completions", json=body or {}) as response:
        assert response.status_code == 200
        return [line async for line in response.aiter_lines() if line]


async def test_chunks_however_they_are_cut_and_one_connection_for_all() -> None:
    whole = CHUNKED + b"9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n"
    server = Server([whole], [whole[at : at + 1] for at in range(len(whole))], [whole])
    async with server.client(headers={"X-Key": "k"}) as client:
        for _ in range(3):
            assert await lines(client, {"n": 1}) == ["data: a", "data: b"]
    assert server.connections == 1
    head, body = server.requests[0].split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"\r\nHost: 127.0.0.1" in head and b"\r\nX-Key: k" in head and body == b'{"n":1}'


async def test_requests_at_once_have_connections_of_their_own() -> None:
    answer = [CHUNKED, b"2\r\na\n\r\n", b"0\r\n\r\n"]
    server = Server(*(4 * [answer]))
    async with server.client() as client:
        assert await asyncio.gather(*(lines(client) for _ in range(4))) == 4 * [["a"]]
    assert server.connections == 4


async def test_an_answer_with_a_length_that_is_compressed() -> None:
    body = gzip.compress(b'{"error": 1}')
    head = b"HTTP/1.1 429 Too Many\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    async with Server([head % len(body) + body]).client() as client:
        answer = await client.get("/models")
    assert answer.status_code == 429 and answer.json() == {"error": 1}


async def test_an_answer_that_ends_with_its_connection() -> None:
    server = Server([OK + b"\r\n", b"abc", b""], [OK + b"Content-Length: 1\r\n\r\nd"])
    async with server.client() as client:
        assert (await client.get("/")).content == b"abc"
        assert (await client.get("/")).content == b"d"
    assert server.connections == 2


async def test_an_answer_that_is_not_read_to_its_end_leaves_no_connection() -> None:
    server = Server([CHUNKED + b"2\r\na\n\r\n"], [CHUNKED + b"2\r\nb\n\r\n0\r\n\r\n"])
    async with server.client() as client:
        async with client.stream("GET", "/"):
            pass
        assert await lines(client) == ["b"]
    assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([b""], httpx.RemoteProtocolError),
        ([CHUNKED + b"9\r\nda", b""], httpx.RemoteProtocolError),
        ([b"no HTTP at all\r\n\r\n"], httpx.RemoteProtocolError),
        ([CHUNKED], httpx.ReadTimeout),
        ([b"HTTP/1.1"], httpx.ReadTimeout),
    ],
    ids=["nothing", "half", "nonsense", "slow body", "slow head"],
)
async def test_broken_answers_raise_what_httpx_raises(answer: list[bytes], error: Any) -> None:
    async with Server(answer).client(timeout=httpx.Timeout(5, read=0.2)) as client:
        with pytest.raises(error):
            await lines(client)


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_request_without_a_head_leaves_no_connection(cancelled: bool) -> None:
    server = Server([b"HTTP/1.1"])
    async with server.client(timeout=httpx.Timeout(5, read=None if cancelled else 0.1)) as client:
        asking = asyncio.create_task(client.get("/"))
        while cancelled and not server.requests:
            await asyncio.sleep(0)
        if cancelled:
            asking.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else httpx.ReadTimeout):
            await asking
        await asyncio.wait_for(server.ended.wait(), 5)  # while the client goes on


async def test_nobody_is_there() -> None:
    async with Server().client() as client:
        pass
    fresh = httpx.AsyncClient(base_url=client.base_url, transport=WireTransport())
    async with fresh:
        with pytest.raises(httpx.ConnectError):
            await fresh.get("/")


def test_a_proxy_of_the_environment_is_httpxs_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert isinstance(wire_transport(), WireTransport)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert wire_transport() is None
