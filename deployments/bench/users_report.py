"""What simulated users measured: as JSON, as lines, and as a live table."""

import asyncio
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rayfin.deployments.bench.measures import Spread, figures
from rayfin.deployments.bench.users import User, UserLoad

REFRESH_SECONDS = 0.25
RECENT = 200  # requests behind the live percentiles: sorting must not disturb the measurement
FRAME_LINES = 12  # of the live table, without its users
SHOWN_ERRORS = 5
STYLES = {"thinking": "dim", "waiting": "yellow", "streaming": "green", "done": "dim"}


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


async def run_with_table(load: UserLoad, console: Console) -> None:
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
