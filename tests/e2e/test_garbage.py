"""A storm of garbage on the socket: no failure, no effect on other clients, no leak."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from rayfin import LLM, SamplingParams

REQUESTS = 1000
AT_ONCE = 50
SECONDS = 2.0  # for which a client waits that has sent half of something
PATHS = [b"/v1/completions", b"/v1/chat/completions", b"/v1/responses", b"/v1/messages", b"/x"]
HEAD = b"Host: rayfin\r\nContent-Type: application/json\r\nConnection: close\r\n"
VICTIM: dict[str, Any] = {"prompt": "Storm: count the rain", "max_tokens": 60}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
FILES, TASKS = 12, 2  # more than before: what Ray opens and starts by itself


class Garbage:
    """Requests of every kind of wrong; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def next(self) -> bytes:
        makers = (self._noise, self._framing, self._long, self._json, self._mutated, self._half)
        return self._chance.choice(makers)()

    def _noise(self) -> bytes:
        return self._chance.randbytes(self._chance.randrange(1, 5000)) + b"\r\n\r\n"

    def _framing(self) -> bytes:
        chunked = b"Transfer-Encoding: chunked\r\n"
        headers = [
            chunked + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
            chunked + b"\r\n5\r\nabc\r\nZZ\r\n",
            b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
            b"X: a\r\n b\r\n\r\n",
            b"X-Request-Id: \xff\xff\r\n\r\n",
            b"Upgrade: h2c\r\nContent-Encoding: gzip\r\n\r\n",
            b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n",
        ]
        method = self._chance.choice([b"FOO", b"POST", b"GET", b"CONNECT", b"TRACE", b"get"])
        return self._line(method) + HEAD + self._chance.choice(headers)

    def _long(self) -> bytes:
        size = self._chance.choice([10_000, 50_000, 200_000])
        return self._chance.choice(
            [
                b"GET /" + b"x" * size + b" HTTP/1.1\r\n" + HEAD + b"\r\n",
                self._line(b"GET") + HEAD + b"X: " + b"y" * size + b"\r\n\r\n",
                self._line(b"GET") + HEAD + b"X: y\r\n" * (size // 6) + b"\r\n",
            ]
        )

    def _json(self) -> bytes:
        bodies = [
            *(b"", b"{", b"[]", b"null", b"NaN", b'{"n":1,"n":2}', b"\xff\xfe{\x00}\x00"),
            *(b"[" * 100_000, b'{"prompt":"\\ud800"}', b'{"prompt":[-1]}', b"1" * 5000),
            b'{"prompt":"a","max_tokens":1e999}',
            self._chance.randbytes(300),
        ]
        body = self._chance.choice(bodies)
        return self._line(b"POST") + HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def _mutated(self) -> bytes:
        """A good request with some of its bytes replaced, dropped or doubled."""
        body = json.dumps({"prompt": "a", "max_tokens": 4, "stream": True}).encode()
        data = bytearray(
            b"POST /v1/completions HTTP/1.1\r\n"
            + (HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        )
        for _ in range(self._chance.randrange(1, 6)):
            at = self._chance.randrange(len(data))
            data[at : at + 1] = self._chance.choice(
                [self._chance.randbytes(1), b"", data[at : at + 1] * 2]
            )
        return bytes(data)

    def _half(self) -> bytes:
        whole = self._json()
        return whole[: self._chance.randrange(1, len(whole))]

    def _line(self, method: bytes) -> bytes:
        return method + b" " + self._chance.choice(PATHS) + b" HTTP/1.1\r\n"


async def status_of(host: str, port: int, data: bytes) -> int | None:
    """The status that ``data`` is answered with; None if it is not, as nothing whole was sent."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        async with asyncio.timeout(SECONDS):
            answer = await reader.read()
    except TimeoutError:
        return None
    except ConnectionError:  # the server has closed while all of it was being sent
        answer = b""
    finally:
        writer.transport.abort()
    if not answer:
        return None
    version, status = answer.split(b" ", 2)[:2]
    assert version == b"HTTP/1.1", answer[:200]
    if int(status) >= 400:
        json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    return int(status)


def test_a_storm_of_garbage_hurts_nobody(
    app: Any,
    solo: LLM,
    held: Callable[[], dict[str, tuple[int, int]]],
    eventually: Callable[..., Any],
) -> None:
    address = urlsplit(app.url)
    garbage = Garbage(2718)
    todo = [garbage.next() for _ in range(REQUESTS)]
    params = SamplingParams(max_tokens=VICTIM["max_tokens"], **GREEDY)
    alone = solo.generate([VICTIM["prompt"]], params, use_tqdm=False)[0].outputs[0].text
    seen: Counter[int | None] = Counter()
    over = asyncio.Event()

    async def throw() -> None:
        while todo:
            data = todo.pop()
            status = await status_of(str(address.hostname), int(address.port or 80), data)
            assert status is None or status < 500, data[:300]
            seen[status] += 1

    async def victim(http: Any) -> int:
        heard = 0
        while not over.is_set() or not heard:
            events = [event async for event in app.stream(http, {**VICTIM, **GREEDY})]
            assert "".join(event["choices"][0]["text"] for event in events) == alone
            heard += 1
        return heard

    async def storm() -> None:
        async with app.async_client() as http:
            victims = [asyncio.create_task(victim(http)) for _ in range(3)]
            await asyncio.gather(*(throw() for _ in range(AT_ONCE)))
            over.set()
            await asyncio.gather(*victims)

    with app.client() as http:  # whatever Ray opens for the first request is there
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).raise_for_status()
    before, holding = app.idle(), held()
    asyncio.run(storm())

    assert sum(seen.values()) == REQUESTS
    assert {400, 404, 413, 414, 415, 431} <= set(seen), seen
    after = app.idle()
    assert not (Counter(after.finished) - Counter(before.finished))["error"]

    def let_go() -> bool:
        now = held()
        return all(
            now[name][0] <= files + FILES and now[name][1] <= tasks + TASKS
            for name, (files, tasks) in holding.items()
        )

    eventually(let_go, "the proxy and the ingress hold what they held before")
    with app.client() as http:
        assert http.get("/load").json() == {"server_load": 0}
