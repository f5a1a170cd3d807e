"""The operator's commands: ``rayfin status``, ``drain``, ``cache reset``, ``sleep``, ``wake``."""

import json
import sys
from collections.abc import Callable
from time import monotonic
from time import sleep as pause
from typing import Any

import click

from rayfin.actors.timing import OPERATION_POLL_SECONDS
from rayfin.deployments.cli.group import Commands
from rayfin.deployments.cli.options import DEFAULT_URL, ENVIRONMENT

ADMIN_URL_VARIABLE = "RAYFIN_ADMIN_URL"

Command = Callable[..., Any]


def operator_options(command: Command) -> Command:
    """Adds the options of a client of a server's ``/admin``."""
    url = click.option(
        *("--url", "--admin-url", "url"),
        default=DEFAULT_URL,
        show_default=True,
        envvar=ADMIN_URL_VARIABLE,
        show_envvar=True,
        help="base URL of the server's API, or of its --admin-port",
    )
    key = click.option(
        "--admin-api-key",
        envvar=ENVIRONMENT["admin_api_key"],
        show_envvar=True,
        help="the server's --admin-api-key",
    )
    return url(key(command))


def engine_option(command: Command) -> Command:
    """Adds the options that select engines."""
    engine = click.option(
        "--engine", metavar="N", help="number of the engine in `rayfin status`; default: all"
    )
    model = click.option("--model", metavar="NAME", help="only engines of this model")
    return engine(model(command))


@click.command()
@operator_options
@click.option("--once", is_flag=True, help="print one sample and exit")
@click.option("--json", "as_json", is_flag=True, help="print one line of JSON per sample")
@click.option(
    "--interval",
    type=click.FloatRange(0.05),
    default=1.0,
    show_default=True,
    help="seconds between two samples; rates are computed over them",
)
def status(url: str, admin_api_key: str | None, once: bool, as_json: bool, interval: float) -> None:
    """Show the load of a server's engines until Ctrl-C.

    \b
    Example:
      rayfin status --once --json
    """
    from rayfin.deployments.cli.engines import Server, Status, lines, table

    with Server.connect(url, admin_api_key) as server:
        last = server.sample()

        def next_status() -> Status:
            nonlocal last
            pause(interval)
            last, before = server.sample(), last
            return Status.between(before, last)

        if as_json or once or not sys.stdout.isatty():
            while True:
                status = next_status()
                click.echo(json.dumps(status.as_json()) if as_json else "\n".join(lines(status)))
                if once:
                    return
        from rich.live import Live

        with Live(auto_refresh=False, transient=True) as live:
            while True:
                live.update(table(next_status()), refresh=True)


@click.command()
@operator_options
@engine_option
@click.option("--timeout", type=float, default=600.0, show_default=True, help="seconds to wait")
@click.option("--undo", is_flag=True, help="accept requests again")
def drain(
    url: str,
    admin_api_key: str | None,
    engine: str | None,
    model: str | None,
    timeout: float,
    undo: bool,
) -> int:
    """Stop sending requests to an engine and wait until it has finished its own.

    New requests go to other engines, or wait for one (--engine-timeout of the server). Exits with 1
    if requests remain after --timeout; they continue.

    \b
    Example:
      rayfin drain --engine 1
    """
    from rayfin.deployments.cli.engines import Server

    with Server.connect(url, admin_api_key) as server:
        engines = server.command("admit" if undo else "drain", engine, model)
        deadline = monotonic() + timeout
        while not undo and (left := server.requests_left(engines)):
            if monotonic() > deadline:
                click.echo(f"{left} requests remain.")
                return 1
            pause(OPERATION_POLL_SECONDS)
    click.echo("Accepting requests." if undo else "Drained.")
    return 0


@click.group(cls=Commands)
def cache() -> None:
    """Manage the cache of a server."""


@cache.command()
@operator_options
@engine_option
def reset(url: str, admin_api_key: str | None, engine: str | None, model: str | None) -> None:
    """Reset the prefix cache. Running requests keep their pages.

    \b
    Example:
      rayfin cache reset
    """
    _command(url, admin_api_key, "cache/reset", engine, model)
    click.echo("The prefix cache is empty.")


@click.command()
@operator_options
@engine_option
def sleep(url: str, admin_api_key: str | None, engine: str | None, model: str | None) -> None:
    """Free the memory of an engine's KV cache. The weights stay loaded.

    Running requests pause and continue with the same tokens after `rayfin wake`. While all engines
    sleep, new requests get a 503 with the code engine_asleep.

    \b
    Example:
      rayfin sleep --engine 1
    """
    _command(url, admin_api_key, "sleep", engine, model)
    click.echo("Asleep.")


@click.command()
@operator_options
@engine_option
def wake(url: str, admin_api_key: str | None, engine: str | None, model: str | None) -> None:
    """Wake a sleeping engine.

    \b
    Example:
      rayfin wake
    """
    _command(url, admin_api_key, "wake", engine, model)
    click.echo("Awake.")


def _command(
    url: str, key: str | None, command: str, engine: str | None, model: str | None
) -> None:
    from rayfin.deployments.cli.engines import Server

    with Server.connect(url, key) as server:
        server.command(command, engine, model)


@click.command("collect-env")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def collect_env(as_json: bool) -> None:
    """Print what a report of a fault should say of this machine.

    Versions, processors, memory, GPUs, and environment variables without secrets.

    \b
    Example:
      rayfin collect-env
    """
    from rayfin.deployments.telemetry.environment import collect

    sections = collect()
    if as_json:
        click.echo(json.dumps(sections, indent=2))
        return
    for title, values in sections.items():
        click.echo(f"{title}:")
        for name, value in values.items():
            click.echo(f"  {name}: {value}")
