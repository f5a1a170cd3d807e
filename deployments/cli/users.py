"""``rayfin users``: load-test a running server with simulated users."""

import asyncio
import json
import sys
from typing import IO, TYPE_CHECKING, Any

import click

from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.cli.options import (
    SectionedCommand,
    build,
    sampling_options,
    server_options,
    values_of,
)

if TYPE_CHECKING:
    from rayfin.deployments.bench.users import UserLoad

SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "ignore_eos")
MAX_TOKENS = 128  # bounds the answer of a model that does not end it
REQUESTS = 32


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
) -> int:
    """Simulate users of a running server and measure latency and throughput.

    Each user sends a question, reads the streamed answer, and repeats. TTFT is the time to the
    first text, ITL the time between two pieces of it. Exits with 1 if any request fails.

    \b
    Example:
      rayfin users --users 32 --duration 60 --think-time 2 --json numbers.json
    """
    build(SamplingParams)
    if requests is None and duration is None:
        requests = REQUESTS

    import httpx

    from rayfin.deployments.bench import workload
    from rayfin.deployments.bench.endpoint import client_settings, find_model
    from rayfin.deployments.bench.users import UserLoad, UsersPlan

    connection = client_settings(url, api_key)
    with httpx.Client(**connection) as client:
        model = find_model(client, model)
    plan = UsersPlan(
        model=model,
        ask=workload.random_words(prompt_tokens) if prompt_tokens else workload.questions(),
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
        asyncio.run(_run(load, sys.stdout.isatty()))
    finally:  # after Ctrl-C too
        _report(load, file)
    return 1 if load.errors else 0


async def _run(load: "UserLoad", live: bool) -> None:
    async with load.client:
        if not live:
            return await load.run()

        from rich.console import Console

        from rayfin.deployments.bench.users_report import run_with_table

        await run_with_table(load, Console())


def _report(load: "UserLoad", file: IO[str] | None) -> None:
    from rich.console import Console

    from rayfin.deployments.bench.users_report import as_json, summary_lines, summary_table

    if sys.stdout.isatty():
        Console().print(summary_table(load))
    else:
        print("\n".join(summary_lines(load)))
    if file is not None:
        json.dump(as_json(load), file, indent=2)
        file.write("\n")
