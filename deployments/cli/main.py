"""The command ``rayfin``.

Commands import what they need when they run, so that ``rayfin --help`` is instant.
"""

import sys
from collections.abc import Sequence

import click

from rayfin import __version__
from rayfin.deployments.cli.agents import agents
from rayfin.deployments.cli.bench import bench
from rayfin.deployments.cli.chat import chat
from rayfin.deployments.cli.generate import generate
from rayfin.deployments.cli.group import Commands
from rayfin.deployments.cli.operate import cache, collect_env, drain, sleep, status, wake
from rayfin.deployments.cli.run_batch import run_batch
from rayfin.deployments.cli.serve import serve

INTERRUPTED = 130  # as a shell reports Ctrl-C


@click.group(
    cls=Commands,
    commands=[
        *(serve, generate, run_batch, chat, agents, bench),
        *(status, drain, cache, sleep, wake, collect_env),
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Run `rayfin COMMAND --help` for the flags of a command.",
)
@click.version_option(__version__, prog_name="rayfin", message="%(prog)s %(version)s")
@click.option("--traceback", is_flag=True, hidden=True)
def cli(traceback: bool) -> None:
    """Serve large language models as Ray actors behind an OpenAI-compatible API."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    0: success, 1: failure, 2: an invalid flag or an unsupported model, 130: Ctrl-C.
    """
    try:
        given = sys.argv[1:] if arguments is None else arguments
        status = cli.main(given or ["--help"], "rayfin", standalone_mode=False)
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        print(f"rayfin: error: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    return status if isinstance(status, int) else 0


def _one_line(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split())
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{text} (see {error.ctx.command_path} --help)"
    return text
