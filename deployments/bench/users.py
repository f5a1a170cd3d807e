"""Simulated users of a running server, and what they measure."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from rayfin.actors.errors import ServerError
from rayfin.deployments.bench.endpoint import (
    BROKEN_OFF,
    StreamPiece,
    chat_body,
    describe,
    read_event,
    refusal,
)
from rayfin.deployments.bench.questions import Ask

AFTER_ERROR_SECONDS = 0.2  # a server that refuses is not hammered
State = Literal["thinking", "waiting", "streaming", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsersPlan:
    """What the users do. At least one of ``requests`` and ``duration`` ends it."""

    model: str
    ask: Ask
    users: int = 8
    requests: int | None = None  # of all users together
    duration: float | None = None  # seconds; answers under way then are still awaited
    think_time: float = 0.0  # mean seconds between an answer and the next question
    seed: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Measurement:
    """One request. Times are seconds."""

    ttft: float | None = None  # until the first text; None: there was none
    gaps: list[float] = field(default_factory=list)  # between one piece of text and the next
    total: float = 0.0
    tokens: int = 0  # as the server counts; pieces of text if it does not
    error: str | None = None


@dataclass(slots=True)
class User:
    """One simulated user as the live table shows it."""

    number: int
    state: State = "waiting"
    done: int = 0
    failed: int = 0
    tokens: int = 0
    last_ttft: float | None = None
    gap_sum: float = 0.0
    gap_count: int = 0

    @property
    def mean_gap(self) -> float | None:
        return self.gap_sum / self.gap_count if self.gap_count else None


@dataclass(slots=True)
class UserTotals:
    """What all users have measured so far."""

    done: int = 0
    tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of whole answers
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return self.errors.total()

    def add(self, request: Measurement) -> None:
        """Counts a request; a failed one only as failed: its times would flatter the server."""
        if request.error is not None:
            self.errors[request.error] += 1
            return
        self.done += 1
        self.tokens += request.tokens
        self.gaps += request.gaps
        self.seconds.append(request.total)
        if request.ttft is not None:
            self.ttfts.append(request.ttft)


class UserLoad:
    """Users that each ask, read the answer as it streams, think, and ask again."""

    def __init__(self, client: httpx.AsyncClient, plan: UsersPlan) -> None:
        self.client = client
        self.plan = plan
        self.users = [User(number) for number in range(plan.users)]
        self.totals = UserTotals()
        self._left = plan.requests
        self._started = self._ended = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start, or of the whole run once it has ended."""
        return (self._ended or time.perf_counter()) - self._started if self._started else 0.0

    async def run(self) -> None:
        """Runs the plan to its end. A failed request is counted, never raised."""
        self._started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for user in self.users:
                    group.create_task(self._live(user))
        finally:
            self._ended = time.perf_counter()

    async def _live(self, user: User) -> None:
        rng = random.Random(f"{self.plan.seed}/{user.number}")
        while True:
            if self.plan.think_time:  # before the first question too: users do not come in step
                user.state = "thinking"
                await self._pause(rng.expovariate(1 / self.plan.think_time))
            if not self._take_request():
                break
            user.state = "waiting"
            request = await self._request(user, self.plan.ask(rng))
            self._count(user, request)
            if request.error is not None:
                await self._pause(AFTER_ERROR_SECONDS)
        user.state = "done"

    async def _pause(self, seconds: float) -> None:
        """Sleeps, but not past the end of the plan."""
        if self.plan.duration is not None:
            seconds = min(seconds, max(0.0, self.plan.duration - self.elapsed))
        await asyncio.sleep(seconds)

    def _take_request(self) -> bool:
        if self.plan.duration is not None and self.elapsed >= self.plan.duration:
            return False
        if self._left is None:
            return True
        self._left -= 1
        return self._left >= 0

    async def _request(self, user: User, messages: list[dict[str, str]]) -> Measurement:
        result = Measurement()
        start = last = time.perf_counter()
        pieces = 0
        counted: int | None = None
        try:
            async for piece in self._stream(messages):
                now = time.perf_counter()
                if piece.text:
                    pieces += 1
                    if result.ttft is None:
                        result.ttft = user.last_ttft = now - start
                        user.state = "streaming"
                    else:
                        result.gaps.append(now - last)
                    last = now
                if piece.completion_tokens is not None:
                    counted = piece.completion_tokens
        except ServerError as error:
            result.error = str(error)
        result.total = time.perf_counter() - start
        result.tokens = pieces if counted is None else counted
        return result

    async def _stream(self, messages: list[dict[str, str]]) -> AsyncIterator[StreamPiece]:
        body = chat_body(self.plan.model, messages, self.plan.sampling)
        try:
            async with self.client.stream("POST", "/chat/completions", json=body) as response:
                if response.is_error:
                    await response.aread()
                    raise refusal(response)
                async for line in response.aiter_lines():
                    piece = read_event(line)
                    if piece is not None and piece.done:
                        return
                    if piece is not None:
                        yield piece
        except httpx.HTTPError as error:
            raise ServerError(describe(error)) from None
        raise ServerError(BROKEN_OFF)

    def _count(self, user: User, request: Measurement) -> None:
        self.totals.add(request)
        if request.error is not None:
            user.failed += 1
            return
        user.done += 1
        user.tokens += request.tokens
        user.gap_sum += sum(request.gaps)
        user.gap_count += len(request.gaps)
