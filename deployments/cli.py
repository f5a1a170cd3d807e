"""The command ``rayfin``.

Nothing heavy is imported before a command runs: ``rayfin --help`` answers at once.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from rayfin import __version__
from rayfin.actors.errors import InvalidConfig, RayfinError
from rayfin.deployments.commands.chat import chat
from rayfin.deployments.commands.generate import generate
from rayfin.deployments.commands.options import named_by_flag
from rayfin.deployments.commands.serve import serve
from rayfin.deployments.commands.users import users

INTERRUPTED = 130  # as a shell reports Ctrl-C


class Failed(click.ClickException):
    exit_code = 1


class Refused(click.ClickException):
    exit_code = 2


class Commands(click.Group):
    """The group of all commands, in the order in which they are written down."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; whatever it raises becomes one line for people to read."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.params["traceback"]:
                traceback.print_exc()
            raise _readable(error, self.commands[str(ctx.invoked_subcommand)]) from error


@click.group(
    cls=Commands,
    commands=[serve, generate, chat, users],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="rayfin COMMAND --help lists a command's flags.",
)
@click.version_option(__version__, prog_name="rayfin", message="%(prog)s %(version)s")
@click.option("--traceback", is_flag=True, hidden=True)
def cli(traceback: bool) -> None:
    """Large language models as Ray actors, behind the OpenAI API."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    0 done · 1 failed · 2 a flag or a model that cannot be served · 130 Ctrl-C.
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


def _readable(error: Exception, command: click.Command) -> click.ClickException:
    if isinstance(error, RayfinError):
        message = named_by_flag(command, error.message, error.param)
        return Refused(message) if isinstance(error, InvalidConfig) else Failed(message)
    if isinstance(error, OSError) and error.filename is not None:
        return click.FileError(os.fsdecode(error.filename), error.strerror)
    where = f"rayfin --traceback {command.name} ... shows where"
    return Failed(f"{type(error).__name__}: {error} ({where})")


def _one_line(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split())
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{text} (see {error.ctx.command_path} --help)"
    return text
