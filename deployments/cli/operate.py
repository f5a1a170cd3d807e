"""``rayfin status``, ``drain``, ``cache reset``, ``sleep`` and ``wake``: an operator's commands."""

import json
import sys
from collections.abc import Callable
from time import monotonic
from time import sleep as pause
from typing import Any

import click

from rayfin.deployments.cli.group import Commands
from rayfin.deployments.cli.options import DEFAULT_URL, ENVIRONMENT

POLL_SECONDS = 0.5
ADMIN_URL_VARIABLE = "RAYFIN_ADMIN_URL"

Command = Callable[..., Any]


def operator_options(command: Command) -> Command:
    """The options of a command that speaks to a server's ``/admin``."""
    url = click.option(
        *("--url", "--admin-url", "url"),
        default=DEFAULT_URL,
        show_default=True,
        envvar=ADMIN_URL_VARIABLE,
        show_envvar=True,
        help="the server's API, or where its --admin-port is",
    )
    key = click.option(
        "--admin-api-key",
        envvar=ENVIRONMENT["admin_api_key"],
        show_envvar=True,
        help="the operator's key, that the server was started with",
    )
    return url(key(command))


def engine_option(command: Command) -> Command:
    """Which engines a command is for."""
    engine = click.option(
        "--engine", metavar="N", help="one engine, by its number in `rayfin status`; default: all"
    )
    model = click.option(
        "--model", metavar="NAME", help="whose engines, where several models are served"
    )
    return engine(model(command))


@click.command()
@operator_options
@click.option("--once", is_flag=True, help="show it once, over one interval, and leave")
@click.option("--json", "as_json", is_flag=True, help="one line of JSON for each look")
@click.option(
    "--interval",
    type=click.FloatRange(0.05),
    default=1.0,
    show_default=True,
    help="seconds between two looks, and that rates are taken over",
)
def status(url: str, admin_api_key: str | None, once: bool, as_json: bool, interval: float) -> None:
    """Show what the engines of a server are doing, until Ctrl-C.

    \b
    Example:
      rayfin status --once --json
    """
    from rayfin.deployments.cli.engines import Server, Status, lines, table

    with Server.connect(url, admin_api_key) as server:
        before = server.look()

        def look() -> Status:
            nonlocal before
            pause(interval)
            before, since = server.look(), before
            return Status.between(since, before)

        if as_json or once or not sys.stdout.isatty():
            while True:
                now = look()
                click.echo(json.dumps(now.as_json()) if as_json else "\n".join(lines(now)))
                if once:
                    return
        from rich.live import Live

        with Live(auto_refresh=False, transient=True) as live:
            while True:
                live.update(table(look()), refresh=True)


@click.command()
@operator_options
@engine_option
@click.option("--timeout", type=float, default=600.0, show_default=True, help="seconds to wait")
@click.option("--undo", is_flag=True, help="take requests again")
def drain(
    url: str,
    admin_api_key: str | None,
    engine: str | None,
    model: str | None,
    timeout: float,
    undo: bool,
) -> int:
    """Stop giving an engine requests, and wait until it has none.

    New requests go to other engines, or wait for one (--engine-timeout of the server). Fails if
    some are left when the time is over; they go on.

    \b
    Example:
      rayfin drain --engine 1
    """
    from rayfin.deployments.cli.engines import Server

    with Server.connect(url, admin_api_key) as server:
        told = server.tell("admit" if undo else "drain", engine, model)
        deadline = monotonic() + timeout
        while not undo and (left := server.requests_left(told)):
            if monotonic() > deadline:
                click.echo(f"{left} requests are left.")
                return 1
            pause(POLL_SECONDS)
    click.echo("Takes requests again." if undo else "Drained.")
    return 0


@click.group(cls=Commands)
def cache() -> None:
    """Manage the cache of a server."""


@cache.command()
@operator_options
@engine_option
def reset(url: str, admin_api_key: str | None, engine: str | None, model: str | None) -> None:
    """Forget all prefixes: what comes is computed anew. Requests that run keep their pages.

    \b
    Example:
      rayfin cache reset
    """
    _tell(url, admin_api_key, "cache/reset", engine, model)
    click.echo("The prefix cache is empty.")


@click.command()
@operator_options
@engine_option
def sleep(url: str, admin_api_key: str | None, engine: str | None, model: str | None) -> None:
    """Give back the memory of an engine's KV cache; its weights stay.

    Requests that run there wait, and go on, exact, when it is woken. While all engines sleep, new
    ones are refused: 503 engine_asleep.

    \b
    Example:
      rayfin sleep --engine 1
    """
    _tell(url, admin_api_key, "sleep", engine, model)
    click.echo("Asleep.")


@click.command()
@operator_options
@engine_option
def wake(url: str, admin_api_key: str | None, engine: str | None, model: str | None) -> None:
    """End an engine's sleep.

    \b
    Example:
      rayfin wake
    """
    _tell(url, admin_api_key, "wake", engine, model)
    click.echo("Awake.")


def _tell(url: str, key: str | None, command: str, engine: str | None, model: str | None) -> None:
    from rayfin.deployments.cli.engines import Server

    with Server.connect(url, key) as server:
        server.tell(command, engine, model)
