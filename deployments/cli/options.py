"""Generates command-line options from dataclasses.

A field's name is its flag, its type hint the type, its default the default, and
``metadata["help"]`` the help.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from rayfin.actors.errors import InvalidConfig, InvalidRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.serve.server_args import ADMIN_KEY_VARIABLES, KEY_VARIABLES

T = TypeVar("T")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

DEFAULT_URL = "http://127.0.0.1:8000/v1"
ENVIRONMENT = {  # secrets should not appear on a command line
    "api_key": KEY_VARIABLES,
    "admin_api_key": ADMIN_KEY_VARIABLES,
}
SECTIONS = {
    "ListenOptions": "Address",
    "ServerArgs": "Server",
    "EngineArgs": "Engine",
    "SamplingParams": "Sampling",
}
SAMPLING_HELP = {
    "temperature": "sampling temperature; 0 is greedy",
    "max_tokens": "maximum number of tokens to generate",
    "top_p": "sample from the most likely tokens with this cumulative probability",
    "top_k": "sample from this many of the most likely tokens; 0 considers all",
    "min_p": "minimum probability of a token, relative to the most likely one",
    "seed": "random seed; the same seed repeats the same samples",
    "stop": "stop at this string; may be repeated",
    "ignore_eos": "continue after the end-of-sequence token",
    "n": "number of outputs for each prompt",
}


class JsonObject(click.ParamType["dict[str, Any]"]):
    """A JSON object; of several, the later ones change the earlier ones."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, dict):
            return value
        try:
            document = json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(document, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return document


def joined(objects: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Objects as one: later values win, objects inside are joined."""
    whole: dict[str, Any] = {}
    for mapping in objects:
        for name, value in mapping.items():
            both = isinstance(value, dict) and isinstance(whole.get(name), dict)
            whole[name] = joined((whole[name], value)) if both else value
    return whole


class FieldOption(click.Option):
    """An option that sets ``field`` of the dataclass ``owner``."""

    def __init__(self, *args: Any, owner: type, field: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.owner = owner
        self.field = field


class SectionedCommand(click.Command):
    """A command whose help lists each dataclass's options under a heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record is not None:
                title = SECTIONS[param.owner.__name__] if isinstance(param, FieldOption) else ""
                sections.setdefault(f"{title} options".strip().capitalize(), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def field_options(
    owner: type, names: Sequence[str] | None = None, **changes: Mapping[str, Any]
) -> Decorator:
    """Adds an option for each field of ``owner``, or for ``names`` only, in that order.

    ``changes`` maps a field's name to click settings that override the generated ones; ``flag``
    among them renames the flag, ``aliases`` are more names of it.
    """
    hints = get_type_hints(owner)
    known = {field.name: field for field in fields(owner)}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(list(names or known)):  # decorators apply from the last to the first
            settings = {**settings_of(known[name], hints[name]), **changes.get(name, {})}
            flag, aliases = settings.pop("flag"), settings.pop("aliases", ())
            switch = f"/--no-{flag}" if settings.get("is_flag") else ""
            flags = [f"--{flag}{switch}", *aliases]
            option = click.option(*flags, cls=FieldOption, owner=owner, field=name, **settings)
            command = option(command)
        return command

    return decorate


def sampling_options(
    names: Sequence[str], *, server: bool = False, **changes: Mapping[str, Any]
) -> Decorator:
    """Adds options of SamplingParams; with ``server`` they have no defaults, for the server has."""
    unset: dict[str, Any] = {"default": None, "show_default": False} if server else {}
    return field_options(
        SamplingParams, names, **{name: {**unset, **changes.get(name, {})} for name in names}
    )


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a server's client."""
    url = click.option(
        "--url", default=DEFAULT_URL, show_default=True, help="base URL of the server's API"
    )
    key = click.option(
        "--api-key", envvar=ENVIRONMENT["api_key"], show_envvar=True, help="API key of the server"
    )
    model = click.option(
        "--model", metavar="NAME", help="model name; default: the first one that the server lists"
    )
    return url(key(model(command)))


def values_of(owner: type) -> dict[str, Any]:
    """Returns the values of the running command's options for ``owner``, by field, if set."""
    context = click.get_current_context()
    return {
        param.field: _value(param, value)
        for param in context.command.params
        if isinstance(param, FieldOption) and param.owner is owner
        if param.name is not None and (value := context.params[param.name]) not in (None, ())
    }


def _value(option: click.Option, value: Any) -> Any:
    if isinstance(option.type, JsonObject):
        return joined(value)
    return list(value) if isinstance(value, tuple) else value


def build(owner: type[T], **more: Any) -> T:
    """Builds the dataclass ``owner`` from the running command's options.

    Raises:
        InvalidConfig: ``owner`` refuses a value.
    """
    try:
        return owner(**values_of(owner) | more)
    except InvalidRequest as error:  # of a flag here, not of a request
        raise InvalidConfig(error.message, error.param) from error


def flag_of(command: click.Command, setting: str) -> str | None:
    """Returns the command's flag for a setting, or None."""
    for param in command.params:
        name = param.field if isinstance(param, FieldOption) else param.name
        if name == setting and isinstance(param, click.Option):
            return param.opts[0]
    return None


def named_by_flag(command: click.Command, message: str, param: str | None) -> str:
    """Returns an error's message with the names of fields replaced by flags."""
    words = {
        option.field: option.opts[0]
        for option in command.params
        if isinstance(option, FieldOption) and "_" in option.field
    }
    flag = flag_of(command, param) if param else None
    if flag and message.startswith(f"{param} "):
        message = flag + message.removeprefix(str(param))
    message = " ".join(_swap(word, words) for word in message.split(" "))
    return message if flag is None or flag in message else f"{flag}: {message}"


def _swap(word: str, words: Mapping[str, str]) -> str:
    bare = word.strip(",.:;()")
    return word.replace(bare, words[bare]) if bare in words else word


def settings_of(field: Field[Any], hint: Any) -> dict[str, Any]:
    """Returns the click settings of a field's option, with its ``flag`` without dashes."""
    text = field.metadata.get("help") or SAMPLING_HELP.get(field.name)
    unsaid = "default" not in (text or "")
    settings: dict[str, Any] = {
        "flag": field.name.replace("_", "-"),
        "default": field.default,
        "show_default": True if field.default is not None else "none" if unsaid else False,
        "help": text,
    }
    if field.name in ENVIRONMENT:
        settings |= {"envvar": ENVIRONMENT[field.name], "show_envvar": True}
    kind = _plain(hint)
    if get_origin(kind) is Literal:
        return settings | {"type": click.Choice(get_args(kind))}
    if get_origin(kind) is dict:
        return settings | {"type": JsonObject(), "multiple": True, "metavar": "JSON"}
    if get_origin(kind) is not None:  # a sequence
        return settings | {"type": get_args(kind)[0], "multiple": True}
    return settings | ({"is_flag": True} if kind is bool else {"type": kind})


def _plain(hint: Any) -> Any:
    """Reduces a union to one type: its sequence if it has one, else its first but None."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return next((kind for kind in kinds if get_origin(kind) is not None), kinds[0])
