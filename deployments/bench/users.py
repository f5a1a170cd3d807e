"""Simulated users of a running server: each asks, reads the answer, thinks, and asks again."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from rayfin.actors.errors import ServerError
from rayfin.deployments.bench.endpoint import chat_body, stream_pieces
from rayfin.deployments.bench.measures import Timeline
from rayfin.deployments.bench.workload import DrawMessages, Messages

AFTER_ERROR_SECONDS = 0.2  # between a failed request and the next one
State = Literal["thinking", "waiting", "streaming", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsersPlan:
    """What the users do. ``requests``, ``duration`` or both end the run."""

    model: str
    ask: DrawMessages
    users: int = 8
    requests: int | None = None  # of all users together
    duration: float | None = None  # seconds; answers in flight at the end are awaited
    think_time: float = 0.0  # mean seconds between an answer and the next question
    seed: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class User:
    """One row of the live table."""

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


class UserLoad:
    """Runs a plan's users. Failed requests are counted, never raised."""

    def __init__(self, client: httpx.AsyncClient, plan: UsersPlan) -> None:
        self.client = client
        self.plan = plan
        self.users = [User(number) for number in range(plan.users)]
        self.timelines: list[Timeline] = []
        self.errors: Counter[str] = Counter()
        self._left = plan.requests
        self._started = self._ended = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start, or of the whole run once it has ended."""
        return (self._ended or time.perf_counter()) - self._started if self._started else 0.0

    async def run(self) -> None:
        self._started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for user in self.users:
                    group.create_task(self._run_user(user))
        finally:
            self._ended = time.perf_counter()

    async def _run_user(self, user: User) -> None:
        rng = random.Random(f"{self.plan.seed}/{user.number}")
        while True:
            if self.plan.think_time:  # before the first question too, or all users start at once
                user.state = "thinking"
                await self._sleep(rng.expovariate(1 / self.plan.think_time))
            if not self._may_ask():
                break
            user.state = "waiting"
            timeline = await self._request(user, self.plan.ask(rng))
            self.count(user, timeline)
            if timeline.error is not None:
                await self._sleep(AFTER_ERROR_SECONDS)
        user.state = "done"

    async def _sleep(self, seconds: float) -> None:
        """Sleeps, at most until the end of the plan."""
        if self.plan.duration is not None:
            seconds = min(seconds, max(0.0, self.plan.duration - self.elapsed))
        await asyncio.sleep(seconds)

    def _may_ask(self) -> bool:
        """Whether another request may start; it is counted if so."""
        if self.plan.duration is not None and self.elapsed >= self.plan.duration:
            return False
        if self._left is None:
            return True
        self._left -= 1
        return self._left >= 0

    async def _request(self, user: User, messages: Messages) -> Timeline:
        body = chat_body(self.plan.model, messages, self.plan.sampling)
        timeline = Timeline(time.perf_counter())
        try:
            async for piece in stream_pieces(self.client, "/chat/completions", body):
                timeline.record(piece)
                if timeline.pieces and user.state == "waiting":
                    user.state, user.last_ttft = "streaming", timeline.ttft
        except ServerError as error:
            timeline.error = str(error)
        timeline.ended = time.perf_counter()
        return timeline

    def count(self, user: User, timeline: Timeline) -> None:
        """Adds a request to its user and to the run."""
        self.timelines.append(timeline)
        if timeline.error is not None:
            self.errors[timeline.error] += 1
            user.failed += 1
            return
        user.done += 1
        user.tokens += timeline.tokens
        user.gap_sum += sum(timeline.gaps)
        user.gap_count += len(timeline.gaps)
