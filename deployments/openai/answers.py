"""Answers that may be asked for again: those of requests that carried an Idempotency-Key."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from starlette.types import Message

from rayfin.actors.errors import Overloaded
from rayfin.deployments.openai.tenant_store import TenantStore

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
    task: "asyncio.Task[None] | None" = None  # that makes it, whoever still listens
    _messages: list[Message] = field(default_factory=list)
    _bytes: int = OVERHEAD
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, message: Message) -> None:
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
        most: int = MAX_ANSWERS,
        max_bytes: int = MAX_BYTES,
        max_age: float = MAX_AGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._answers: TenantStore[Answer] = TenantStore(most, max_bytes, max_age, clock)

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
