"""Requests that run once, however often they are sent: those with an Idempotency-Key."""

import asyncio
import hashlib
import logging
import re
from contextlib import aclosing

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.deployments.edge.limits import STALLED_SECONDS
from rayfin.deployments.openai.answers import Answer, AnswerStore
from rayfin.deployments.openai.errors import ClientGone
from rayfin.deployments.openai.sse import cancelled, tells_failure, until_disconnect

logger = logging.getLogger("rayfin.http")

IDEMPOTENCY_KEY = "idempotency-key"
REPLAYED = b"idempotent-replayed"  # Stripe's name for it
KEY = re.compile(r"[ -~]{1,255}")


class Idempotency:
    """ASGI: the first POST with a key runs, others with it get the same answer, now or as it comes.

    The answer is its tenant's alone. It goes on when its client leaves, for the client's next try.
    Only what went well is kept: a failure is told to all who wait for it, and then forgotten, so
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
        digest = _digest(scope, body)
        answer = self._answers.get(tenant, keys[0])
        known = answer is not None
        if answer is None:
            answer = self._answers.new(tenant, keys[0], digest)
            answer.task = asyncio.create_task(self._run(scope, body, answer))
        if answer.digest != digest:
            raise HTTPException(409, "This Idempotency-Key came with another request before.")
        await _replay(answer, receive, _marked(send) if known else send)

    async def _run(self, scope: Scope, body: bytes, answer: Answer) -> None:
        """Makes the answer, for nobody in particular."""
        unsent = [{"type": "http.request", "body": body, "more_body": False}]
        good = True

        async def receive() -> Message:
            if unsent:
                return unsent.pop()
            await asyncio.Event().wait()  # nobody leaves
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal good
            good = good and message.get("status", 200) < 300
            good = good and not tells_failure(message.get("body", b""))
            answer.take(message)
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
