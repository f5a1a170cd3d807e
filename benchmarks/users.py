"""Simulates users of a running server: each asks, reads the answer, thinks, and asks again.

    python benchmarks/users.py --users 32 --duration 60 --think-time 2 --json numbers.json

TTFT is the time to the first text, ITL the time between two pieces of it, "request" that from the
question to the end of the answer. Only answered requests count. A terminal shows a live table. The
exit status is 1 if any request fails.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Literal

import click
import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rayfin.actors.errors import ServerError
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.bench.endpoint import (
    chat_body,
    client_settings,
    find_model,
    stream_pieces,
)
from rayfin.deployments.bench.measures import Spread, Timeline, figures
from rayfin.deployments.cli.options import (
    SectionedCommand,
    build,
    sampling_options,
    server_options,
    values_of,
)

AFTER_ERROR_SECONDS = 0.2  # between a failed request and the next one
REFRESH_SECONDS = 0.25
RECENT = 200  # requests behind the live percentiles: sorting must not disturb the measurement
FRAME_LINES = 12  # of the live table, without its users
SHOWN_ERRORS = 5
STYLES = {"thinking": "dim", "waiting": "yellow", "streaming": "green", "done": "dim"}
SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "ignore_eos")
MAX_TOKENS = 128  # bounds the answer of a model that does not end it
REQUESTS = 32
CAPITALS = ("France", "Italy", "Spain", "Peru", "Japan", "Kenya", "Norway", "Egypt")
WORDS = ("apple", "river", "stone", "cloud", "lamp", "horse", "paper", "green")
SYLLABLES = ("ba", "do", "fi", "ga", "ka", "lo", "mi", "ne", "po", "ra", "su", "ti")
Messages = list[dict[str, str]]
DrawMessages = Callable[[random.Random], Messages]
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


def questions() -> DrawMessages:
    """Draws short questions of the kinds that the demo model was trained for."""

    def draw(rng: random.Random) -> Messages:
        words = ", ".join(rng.sample(WORDS, rng.randint(2, 4)))
        kinds = (
            f"What is {rng.randint(1, 49)} + {rng.randint(1, 49)}?",
            f"What is the capital of {rng.choice(CAPITALS)}?",
            f"Repeat: {words}",
            f"Reverse this list: {words}",
            "What is Rayfin?",
        )
        return _user_message(rng.choice(kinds))

    return draw


def random_words(tokens: int) -> DrawMessages:
    """Draws prompts of about ``tokens`` tokens that no two requests share."""

    def draw(rng: random.Random) -> Messages:
        words = ("".join(rng.choices(SYLLABLES, k=2)) for _ in range(max(1, tokens // 2)))
        return _user_message(" ".join(words))

    return draw


def _user_message(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def as_json(load: UserLoad) -> dict[str, Any]:
    """The run's figures. Times are seconds; latencies and tokens are those of answered requests.

    Gaps (itl) are between pieces of text; a piece may hold several tokens.
    """
    run = figures(load.timelines, seconds=load.elapsed)
    return {
        "model": load.plan.model,
        "users": load.plan.users,
        "seconds": run.seconds,
        "requests": run.requests,
        "failed": run.failed,
        "tokens": run.output_tokens,
        "requests_per_second": run.requests_per_second,
        "tokens_per_second": run.output_per_second,
        "ttft": asdict(run.ttft),
        "itl": asdict(run.itl),
        "request_latency": asdict(run.e2el),
        "errors": run.errors,
    }


def summary_lines(load: UserLoad) -> list[str]:
    """The summary for a file or a pipe."""
    return [
        f"{load.plan.users} users of {load.plan.model}: {_headline(load)}",
        *(
            f"{name:<8} p50 {_ms(t.p50)}   p90 {_ms(t.p90)}   p99 {_ms(t.p99)}   mean {_ms(t.mean)}"
            for name, t in _latencies(load).items()
        ),
        *_error_lines(load.errors),
    ]


def summary_table(load: UserLoad, recent: int | None = None) -> RenderableType:
    """The summary for a terminal; with ``recent``, latencies of that many last requests only."""
    table = Table("", "p50", "p90", "p99", "mean")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, t in _latencies(load, recent).items():
        table.add_row(name, *(_ms(value) for value in (t.p50, t.p90, t.p99, t.mean)))
    errors = [Text(line, style="red") for line in _error_lines(load.errors)]
    return Group(Text(_headline(load)), table, *errors)


def users_table(load: UserLoad, height: int) -> RenderableType:
    """As many users as fit into ``height`` lines, over the summary so far."""
    table = Table(title=f"{load.plan.users} users of {load.plan.model}")
    table.add_column("user")
    table.add_column("state", width=max(map(len, STYLES)))
    for name in ("requests", "failed", "last TTFT", "mean ITL", "tokens"):
        table.add_column(name, justify="right")
    shown = load.users[: max(1, height - FRAME_LINES)]
    for user in shown:
        table.add_row(*_cells(user))
    hidden = len(load.users) - len(shown)
    more = [Text(f"and {hidden} more users", style="dim")] if hidden else []
    return Group(table, *more, summary_table(load, RECENT))


async def run_live(load: UserLoad, console: Console) -> None:
    """Runs ``load`` under a live table that disappears at the end."""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        running = asyncio.ensure_future(load.run())
        try:
            while not running.done():
                live.update(users_table(load, console.height), refresh=True)
                await asyncio.wait({running}, timeout=REFRESH_SECONDS)
        finally:
            running.cancel()
            await asyncio.wait({running})
    running.result()


def _headline(load: UserLoad) -> str:
    requests, tokens = (sum(getattr(user, n) for user in load.users) for n in ("done", "tokens"))
    seconds = load.elapsed or float("inf")
    return (
        f"{requests} requests in {load.elapsed:.1f} s, {load.errors.total()} failed · "
        f"{requests / seconds:.1f} requests/s · {tokens / seconds:.1f} tokens/s"
    )


def _latencies(load: UserLoad, recent: int | None = None) -> dict[str, Spread]:
    run = figures(load.timelines[-recent:] if recent else load.timelines)
    return {"TTFT": run.ttft, "ITL": run.itl, "request": run.e2el}


def _error_lines(errors: Counter[str]) -> list[str]:
    common = errors.most_common(SHOWN_ERRORS)
    rest = errors.total() - sum(count for _, count in common)
    lines = [f"failed {count} x: {error}" for error, count in common]
    return [*lines, f"failed {rest} x otherwise"] if rest else lines


def _cells(user: User) -> list[RenderableType]:
    return [
        str(user.number + 1),
        Text(user.state, style=STYLES[user.state]),
        str(user.done),
        Text(str(user.failed), style="red" if user.failed else "dim"),
        _ms(user.last_ttft),
        _ms(user.mean_gap),
        str(user.tokens),
    ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


@click.command(cls=SectionedCommand)
@server_options
@click.option("--users", "count", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--requests",
    type=click.IntRange(1),
    help=f"total of all users  [default: {REQUESTS}, or no limit with --duration]",
)
@click.option(
    "--duration",
    type=click.FloatRange(0, min_open=True),
    help="seconds after which no request starts",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    help="send prompts of about this many tokens of random words instead of questions",
)
@click.option(
    "--think-time",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="mean seconds between an answer and the next question",
)
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the questions")
@click.option(
    "--json", "file", type=click.File("w", lazy=False), help="write the results to FILE as JSON"
)
@sampling_options(SAMPLING, server=True, max_tokens={"default": MAX_TOKENS, "show_default": True})
def users(
    url: str,
    api_key: str | None,
    model: str | None,
    count: int,
    requests: int | None,
    duration: float | None,
    prompt_tokens: int | None,
    think_time: float,
    seed: int,
    file: IO[str] | None,
    **settings: Any,
) -> None:
    """Simulates users of a running server and measures latency and throughput."""
    build(SamplingParams)
    if requests is None and duration is None:
        requests = REQUESTS
    connection = client_settings(url, api_key)
    with httpx.Client(**connection) as client:
        model = find_model(client, model)
    plan = UsersPlan(
        model=model,
        ask=random_words(prompt_tokens) if prompt_tokens else questions(),
        users=count,
        requests=requests,
        duration=duration,
        think_time=think_time,
        seed=seed,
        sampling=values_of(SamplingParams),
    )
    unlimited = httpx.Limits(max_connections=None)  # a user never waits for another's connection
    load = UserLoad(httpx.AsyncClient(**connection, limits=unlimited), plan)
    try:
        asyncio.run(run_live(load, Console()) if sys.stdout.isatty() else load.run())
    finally:  # after Ctrl-C too
        if sys.stdout.isatty():
            Console().print(summary_table(load))
        else:
            print("\n".join(summary_lines(load)))
        if file is not None:
            json.dump(as_json(load), file, indent=2)
    raise SystemExit(bool(load.errors))


if __name__ == "__main__":
    users()
