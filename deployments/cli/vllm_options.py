"""vLLM's flags as options of ``rayfin serve``, and files of flags (``--config``)."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import click
from click.core import ParameterSource

from rayfin.deployments.cli.group import Refused
from rayfin.deployments.cli.options import SectionedCommand, settings_of
from rayfin.deployments.vllm.table import (
    NOT_NEEDED,
    VLLM_FLAGS,
    Accepted,
    Alias,
    Lacks,
    Rewritten,
    VllmFlag,
)


def negated(name: str) -> str:
    return f"--no-{name.removeprefix('--')}"


SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])?")
POWERS = "kmgt"
ALONE = {
    (flag, key): alone
    for flag in ("--speculative-config", "-sc")
    for key, alone in (
        ("method", "--spec-method"),
        ("model", "--spec-model"),
        ("num-speculative-tokens", "--spec-tokens"),
    )
}
"""Keys of JSON that have flags of their own."""
SWITCHES = ("switch", "once")
SEVERAL = frozenset(name for flag in VLLM_FLAGS if flag.form == "several" for name in flag.names)
CONFIGS = frozenset(name for flag in VLLM_FLAGS if flag.form == "config" for name in flag.names)
REWRITES = {
    name: text
    for flag in VLLM_FLAGS
    if isinstance(flag.outcome, Rewritten)
    for long in flag.names
    for name, text in ((long, flag.outcome.on), (negated(long), flag.outcome.off))
    if text
}


class Size(click.types.IntParamType):
    """An integer that may be written as 8k (8,000), 8K (8,192) or 1.5M.

    ``nothing`` are words for the default.
    """

    def __init__(self, nothing: Sequence[str] = ()) -> None:
        self.nothing = nothing

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.nothing:
            return None
        match = SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2] is None:
            return super().convert(value, param, ctx)
        base = 1000 if match[2].islower() else 1024
        number = float(match[1]) * base ** (1 + POWERS.index(match[2].lower()))
        if not number.is_integer():
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return int(number)


class Words(click.Choice[str]):
    """A choice that also knows vLLM's words, in any case of letters."""

    def __init__(self, choices: Sequence[str], words: dict[str, str]) -> None:
        super().__init__(choices)
        self.words = {word.lower(): word for word in choices} | words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        known = self.words.get(str(value).lower(), value)
        return super().convert(known, param, ctx)


class KnownText(click.types.StringParamType):
    """A text that may be one of vLLM's words."""

    def __init__(self, words: dict[str, str]) -> None:
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.words.get(str(value).lower(), super().convert(value, param, ctx))


class IgnoredOption(click.Option):
    """A flag of vLLM's that sets nothing: it is accepted with a line of the log, or refused."""

    def __init__(self, flag: VllmFlag) -> None:
        long, *short = flag.names
        settings: dict[str, Any] = {"multiple": True} if flag.form == "several" else {}
        if flag.form in SWITCHES:
            settings = {"is_flag": True, "default": None}
        names = [f"{long}/{negated(long)}" if flag.form == "switch" else long, *short]
        name = "vllm_" + long.strip("-").replace("-", "_")
        super().__init__([name, *names], hidden=True, expose_value=False, **settings)
        self.flag = flag
        self.callback = self._judge

    def _judge(self, ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if ctx.get_parameter_source(str(self.name)) is not ParameterSource.COMMANDLINE:
            return
        name, outcome = self.flag.names[0], self.flag.outcome
        if isinstance(outcome, Accepted):
            click.echo(f"rayfin: {name} {NOT_NEEDED}", err=True)
        elif isinstance(outcome, Lacks) and value is not False:
            values = value if isinstance(value, tuple) else (value,)
            if not all(str(word) in outcome.but for word in values):
                raise Refused(f"{name} is not supported: Rayfin has no {outcome.missing}")


class VllmCommand(SectionedCommand):
    """A command that takes vLLM's flags as vLLM does, and reads them from a ``--config`` too.

    Flags that another option of the command has stay that option's.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        taken = set(options_by_name(self))
        for flag in VLLM_FLAGS:
            if isinstance(flag.outcome, Accepted | Lacks) and taken.isdisjoint(flag.names):
                self.params.append(IgnoredOption(flag))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = rewrite(args)
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        if isinstance(file := given.get("config"), str):
            args = [*rewrite(file_arguments(self, file, given)), *args]
        return super().parse_args(ctx, args)


def options_by_name(command: click.Command) -> dict[str, click.Option]:
    """The command's options by each of their flags."""
    return {
        name: option
        for option in command.params
        if isinstance(option, click.Option)
        for name in (*option.opts, *option.secondary_opts)
    }


def aliases_of(owner: type) -> dict[str, dict[str, Any]]:
    """Changes of ``field_options(owner)``: vLLM's names beside ours, and vLLM's values."""
    hints = get_type_hints(owner)
    changes: dict[str, dict[str, Any]] = {}
    words: dict[str, dict[str, str]] = {}
    for flag in VLLM_FLAGS:
        outcome = flag.outcome
        if not isinstance(outcome, Alias) or outcome.setting not in hints:
            continue
        entry = changes.setdefault(outcome.setting, {"aliases": []})
        rayfin_flag = "--" + outcome.setting.replace("_", "-")
        for name in (name for name in flag.names if name != rayfin_flag):
            is_switch = flag.form == "switch" and name.startswith("--")
            entry["aliases"].append(f"{name}/{negated(name)}" if is_switch else name)
        if outcome.sizes:
            entry["type"] = Size(outcome.nothing)
        for word, choice in outcome.words.items():
            words.setdefault(outcome.setting, {})[word.lower()] = choice
    for field in fields(owner):
        if field.name in words:
            kind = settings_of(field, hints[field.name])["type"]
            known = words[field.name]
            is_choice = isinstance(kind, click.Choice)
            changes[field.name]["type"] = (
                Words(kind.choices, known) if is_choice else KnownText(known)
            )
        if names := _rewritten_to(field.name):
            text = f"{settings_of(field, hints[field.name])['help']}; vLLM: {', '.join(names)}"
            changes.setdefault(field.name, {})["help"] = text
    return changes


def _rewritten_to(setting: str) -> list[str]:
    """The switches of vLLM's that stand for a value of the setting."""
    flag = "--" + setting.replace("_", "-")
    return [name for name, text in REWRITES.items() if text.partition("=")[0] == flag]


def rewrite(args: Sequence[str]) -> list[str]:
    """Arguments as click takes them, of arguments as vLLM takes them.

    ``--max_num_seqs`` is ``--max-num-seqs``, ``--compilation-config.mode 3`` is a value of
    ``--compilation-config`` ({"mode": 3}), switches that stand for a setting become it. Several
    words may follow a flag that takes several, if MODEL is elsewhere: else the second is MODEL.
    """
    args = list(_without_paths(args))
    arguments: list[str] = []
    model_known = bool(args) and not args[0].startswith("-")
    model_known = model_known or any(re.match(r"--(model|config)(=|$)", arg) for arg in args)
    several, values = "", 0
    for place, arg in enumerate(args):
        if arg == "--":
            return [*arguments, *args[place:]]
        if re.match(r"--?[A-Za-z]", arg):
            arguments.append(_rewritten_flag(arg))
            several, values = arguments[-1] if arguments[-1] in SEVERAL and model_known else "", 0
            continue
        if several and values:
            arguments.append(several)
        arguments.append(arg)
        values += 1
    return arguments


def _without_paths(args: Sequence[str]) -> Iterator[str]:
    """``--flag.key.inner value`` as ``--flag={"key": {"inner": value}}``, of flags with JSON."""
    rest = iter(args)
    for arg in rest:
        written, equals, text = arg.partition("=")
        flag, *path = written.split(".")
        flag = flag.replace("_", "-")
        if flag not in CONFIGS or not path:
            yield arg
            if arg == "--":
                yield from rest
            continue
        text = text if equals else next(rest, "")
        if len(path) == 1 and (alone := ALONE.get((flag, path[0].replace("_", "-")))):
            yield f"{alone}={text}"
            continue
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        for key in reversed(path):
            value = {key: value}
        yield f"{flag}={json.dumps(value)}"


def _rewritten_flag(arg: str) -> str:
    name, equals, value = arg.partition("=")
    if name == "--help":
        return name
    if name.startswith("--"):
        name = name.replace("_", "-")
    if not equals and name in REWRITES:
        return REWRITES[name]
    return f"{name}{equals}{value}"


def file_arguments(command: click.Command, file: str, given: dict[str, Any]) -> list[str]:
    """The flags of a YAML file as arguments, without those that the command line has ``given``.

    Raises:
        click.UsageError: a file that holds no flags, or an unknown one, or one twice.
    """
    import yaml

    try:
        held = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.UsageError(f"--config: {file} cannot be read: {error}") from error
    if held is None:
        return []
    if not isinstance(held, dict):
        raise click.UsageError(f"--config: {file} must hold flags by name")
    options = options_by_name(command)
    arguments: list[str] = []
    unknown: list[str] = []
    seen: dict[str, str] = {}
    for key, value in held.items():
        written = "model" if key == "model_tag" else str(key)
        flag = f"--{written.replace('_', '-')}"
        target = REWRITES.get(flag, flag).partition("=")[0]
        option = options.get(target)
        if option is None or option.name == "config":
            unknown.append(repr(key))
            continue
        if (earlier := seen.setdefault(str(option.name), str(key))) != str(key):
            raise click.UsageError(f"--config: {file} sets {earlier} and {key}, which are one")
        positional = option.name == "model" and isinstance(given.get("model_name"), str)
        if option.name not in given and not positional:
            arguments += _arguments(flag, option, value, f"--config: {key} of {file}")
    if unknown:
        raise click.UsageError(f"--config: {file} has unknown flags: {', '.join(unknown)}")
    return arguments


def _arguments(flag: str, option: click.Option, value: Any, what: str) -> Iterator[str]:
    if value is None:
        return
    if option.is_flag or flag in REWRITES:
        if not isinstance(value, bool):
            raise click.UsageError(f"{what} must be true or false, got {value!r}")
        opposite = f"--{flag[5:]}" if flag.startswith("--no-") else negated(flag)
        known = value or opposite in (*option.opts, *option.secondary_opts, *REWRITES)
        if known:  # else it has no other form, and false says nothing
            yield flag if value else opposite
        return
    values = value if isinstance(value, list) and option.multiple else [value]
    for word in values:
        text = word if isinstance(word, str) else json.dumps(word)
        yield f"{flag}={text}"
