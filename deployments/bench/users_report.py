"""What simulated users measured: as numbers, as lines, and as a live table."""

import asyncio
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rayfin.deployments.bench.measures import Spread
from rayfin.deployments.bench.users import User, UserLoad

REFRESH_SECONDS = 0.25
RECENT = 5000  # values behind the live percentiles: sorting must not disturb what is measured
FRAME_LINES = 12  # of the live table beside its users
SHOWN_ERRORS = 5
STYLES = {"thinking": "dim", "waiting": "yellow", "streaming": "green", "done": "dim"}


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. Times are seconds; latencies and tokens are those of answered requests."""

    model: str
    users: int
    seconds: float
    requests: int  # answered
    failed: int
    tokens: int
    requests_per_second: float
    tokens_per_second: float
    ttft: Spread
    itl: Spread  # between pieces of text; a piece may hold several tokens
    request_latency: Spread
    errors: dict[str, int]

    @classmethod
    def of(cls, load: UserLoad, recent: int | None = None) -> "Summary":
        """The whole run; with ``recent``, latencies of so many of the last values only."""
        totals = load.totals
        newest = slice(-recent if recent else None, None)
        seconds = load.elapsed
        per_second = 1 / seconds if seconds else 0.0
        return cls(
            model=load.plan.model,
            users=load.plan.users,
            seconds=seconds,
            requests=totals.done,
            failed=totals.failed,
            tokens=totals.tokens,
            requests_per_second=totals.done * per_second,
            tokens_per_second=totals.tokens * per_second,
            ttft=Spread.of(totals.ttfts[newest]),
            itl=Spread.of(totals.gaps[newest]),
            request_latency=Spread.of(totals.seconds[newest]),
            errors=dict(totals.errors),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def latencies(self) -> dict[str, Spread]:
        return {"TTFT": self.ttft, "ITL": self.itl, "request": self.request_latency}

    def headline(self) -> str:
        return (
            f"{self.requests} requests in {self.seconds:.1f} s, {self.failed} failed · "
            f"{self.requests_per_second:.1f} requests/s · {self.tokens_per_second:.1f} tokens/s"
        )

    def lines(self) -> list[str]:
        """The summary for a file or a pipe."""
        return [
            f"{self.users} users of {self.model}: {self.headline()}",
            *(
                f"{name:<8} p50 {_ms(t.p50)}   p90 {_ms(t.p90)}   p99 {_ms(t.p99)}"
                f"   mean {_ms(t.mean)}"
                for name, t in self.latencies().items()
            ),
            *self.error_lines(),
        ]

    def error_lines(self) -> list[str]:
        """The most frequent errors."""
        common = Counter(self.errors).most_common(SHOWN_ERRORS)
        rest = self.failed - sum(count for _, count in common)
        lines = [f"failed {count} x: {error}" for error, count in common]
        return [*lines, f"failed {rest} x otherwise"] if rest else lines


def summary_table(summary: Summary) -> RenderableType:
    """The summary for a terminal."""
    table = Table("", "p50", "p90", "p99", "mean")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, t in summary.latencies().items():
        table.add_row(name, *(_ms(value) for value in (t.p50, t.p90, t.p99, t.mean)))
    errors = [Text(line, style="red") for line in summary.error_lines()]
    return Group(Text(summary.headline()), table, *errors)


def users_table(load: UserLoad, height: int) -> RenderableType:
    """The users, as many as fit into ``height`` lines, over the totals so far."""
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
    return Group(table, *more, summary_table(Summary.of(load, RECENT)))


async def run_with_table(load: UserLoad, console: Console) -> None:
    """Runs ``load`` under a live table, which is gone when it ends."""
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
