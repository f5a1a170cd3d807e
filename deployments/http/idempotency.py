"""Requests that run once, however often they are sent: those with an Idempotency-Key."""

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.actors.errors import ClientGone, Overloaded
from rayfin.actors.timing import STALLED_SECONDS
from rayfin.deployments.http.sse import cancelled, tells_failure, until_disconnect
from rayfin.deployments.http.tenant_store import TenantStore

# Answers that may be asked for again: those of requests that carried an Idempotency-Key.

MAX_ANSWERS = 4096
MAX_BYTES = 64 * 2**20
MAX_AGE = 3600.0  # seconds
OVERHEAD = 512  # bytes of an answer, and of each of its messages, beside what it says


@dataclass(slots=True, eq=False)
class Answer:
    """One answer as its ASGI messages, which come one by one."""

    id: str
    tenant: str
    digest: bytes  # of what was asked
    done: bool = False
    failure: Exception | None = None  # it broke off
    task: "asyncio.Task[None] | None" = None  # computes the answer, with or without a client
    _messages: list[Message] = field(default_factory=list)
    _bytes: int = OVERHEAD
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, message: Message) -> None:
        self._messages.append(message)
        self._bytes += OVERHEAD + len(message.get("body", b""))
        self._tell()

    def finish(self, failure: Exception | None = None) -> None:
        self.done, self.failure = True, failure
        self._tell()

    def size(self) -> int:
        return self._bytes

    async def follow(self) -> AsyncGenerator[Message, None]:
        """Its messages from the first one on, as they come.

        Raises:
            Exception: the one that broke it off.
        """
        number = 0
        while True:
            done, news = self.done, self._news
            while number < len(self._messages):
                yield dict(self._messages[number])  # layers outside add to its headers
                number += 1
            if done:
                break
            await news.wait()
        if self.failure is not None:
            raise self.failure

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class AnswerStore:
    """The answers of one ingress replica by tenant and key; bounded as a ``TenantStore`` is."""

    def __init__(
        self,
        max_answers: int = MAX_ANSWERS,
        max_bytes: int = MAX_BYTES,
        max_age: float = MAX_AGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._answers: TenantStore[Answer] = TenantStore(max_answers, max_bytes, max_age, clock)

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, tenant: str, key: str) -> Answer | None:
        return self._answers.get(_id(tenant, key), tenant)

    def new(self, tenant: str, key: str, digest: bytes) -> Answer:
        """An answer that is yet to come.

        Raises:
            Overloaded: the store is full of answers that are not there yet.
        """
        answer = Answer(_id(tenant, key), tenant, digest)
        if not self._answers.add(answer):
            raise Overloaded("Too many requests with an Idempotency-Key are in progress.")
        return answer

    def settle(self, answer: Answer) -> None:
        """Counts what an answer has become; one for which there is no room is forgotten.

        Those who read a forgotten answer go on reading.
        """
        self._answers.settle(answer)
        if self._answers.num_bytes > self._answers.max_bytes:
            self._answers.remove(answer)

    def forget(self, answer: Answer) -> None:
        self._answers.remove(answer)


def _id(tenant: str, key: str) -> str:
    return f"{tenant}\n{key}"


logger = logging.getLogger("rayfin.http")

IDEMPOTENCY_KEY = "idempotency-key"
REPLAYED = b"idempotent-replayed"  # Stripe's name for it
KEY = re.compile(r"[ -~]{1,255}")
LONG_BODY = 2**20  # bytes from which to digest them leaves the event loop


class Idempotency:
    """ASGI: the first POST with a key runs, others with it get the same answer, now or as it comes.

    The answer is its tenant's alone. It goes on when its client leaves, for the client's next try.
    Only successes are kept: a failure is sent to all clients that wait for it, and forgotten, so
    that the next try runs.

    Raises:
        HTTPException: 400 a malformed key, 409 a key that came with another request.
        Overloaded: too many such requests are in progress.
    """

    def __init__(self, app: ASGIApp, answers: AnswerStore) -> None:
        self._app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = Headers(scope=scope).getlist(IDEMPOTENCY_KEY) if scope["type"] == "http" else []
        if not keys or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        if len(keys) > 1 or not KEY.fullmatch(keys[0]):
            raise HTTPException(400, "Idempotency-Key must be 1 to 255 printable characters.")
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            raise ClientGone from None
        tenant = scope.get("state", {}).get("tenant", "")
        short = len(body) < LONG_BODY
        digest = _digest(scope, body) if short else await asyncio.to_thread(_digest, scope, body)
        answer = self._answers.get(tenant, keys[0])
        known = answer is not None
        if answer is None:
            answer = self._answers.new(tenant, keys[0], digest)
            answer.task = asyncio.create_task(self._run(scope, body, answer))
        del body  # a recording has 25 MiB, and its answer may take minutes
        if answer.digest != digest:
            raise HTTPException(409, "This Idempotency-Key came with another request before.")
        await _replay(answer, receive, _marked(send) if known else send)

    async def _run(self, scope: Scope, body: bytes, answer: Answer) -> None:
        """Computes the answer, independent of any one client."""
        unsent = [{"type": "http.request", "body": body, "more_body": False}]
        del body
        good = True

        async def receive() -> Message:
            if unsent:
                return unsent.pop()
            await asyncio.Event().wait()  # this receiver never disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal good
            good = good and message.get("status", 200) < 300
            good = good and not tells_failure(message.get("body", b""))
            answer.append(message)
            self._answers.settle(answer)

        failure: Exception | None = None
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            failure = error
        finally:
            answer.finish(failure)
            if failure is not None or not good:
                self._answers.forget(answer)


def _digest(scope: Scope, body: bytes) -> bytes:
    """Two requests with the same digest ask for the same."""
    kind = Headers(scope=scope).get("content-type", "")
    if kind.lower().startswith("multipart/"):
        # Each try of a client separates the fields of its form by another boundary.
        boundary = parse_options_header(kind)[1].get(b"boundary", b"")
        if boundary:
            kind = kind.replace(boundary.decode("latin-1"), "")
            body = body.replace(boundary, b"")
    digest = hashlib.sha256()
    for part in (scope["path"].encode(), scope["query_string"], kind.encode(), body):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


async def _replay(answer: Answer, receive: Receive, send: Send) -> None:
    """Sends the answer to one client, until it leaves or stops reading."""
    begun = False

    async def noted(message: Message) -> None:
        nonlocal begun
        begun = True
        await send(message)

    sending = asyncio.create_task(_send(answer, noted))
    leaving = asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(sending, leaving)
    if not begun:
        raise ClientGone


async def _send(answer: Answer, send: Send) -> None:
    async with aclosing(answer.follow()) as messages:
        async for message in messages:
            try:
                async with asyncio.timeout(STALLED_SECONDS):
                    await send(message)
            except (OSError, TimeoutError):
                return logger.info("A client left its answer")


def _marked(send: Send) -> Send:
    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (REPLAYED, b"true")]
        await send(message)

    return marked
