"""Groups of commands that turn exceptions into one-line errors."""

import os
import traceback
from typing import Any

import click

from rayfin.actors.errors import InvalidConfig, RayfinError
from rayfin.deployments.cli.options import named_by_flag


class Failed(click.ClickException):
    exit_code = 1


class Refused(click.ClickException):
    exit_code = 2


class Commands(click.Group):
    """A group that lists its commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command. The innermost group turns its exception into an error of one line."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.find_root().params["traceback"]:
                traceback.print_exc()
            raise _readable(error, self.commands[str(ctx.invoked_subcommand)]) from error


def _readable(error: Exception, command: click.Command) -> click.ClickException:
    if isinstance(error, RayfinError):
        message = named_by_flag(command, error.message, error.param)
        return Refused(message) if isinstance(error, InvalidConfig) else Failed(message)
    if isinstance(error, OSError) and error.filename is not None:
        return click.FileError(os.fsdecode(error.filename), error.strerror)
    where = f"rayfin --traceback {command.name} ... shows where"
    return Failed(f"{type(error).__name__}: {error} ({where})")
