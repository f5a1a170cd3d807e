"""A row of a format that no table has, from where a template writes a call's parts."""

import json
from collections.abc import Iterator
from dataclasses import replace

from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.render import json_text, render_calls
from rayfin.deployments.text.parsing.template_probe import FIRST, SECOND
from rayfin.deployments.text.parsing.trials import CallTrials

NAME = "derived"
_DECODER = json.JSONDecoder()


def derive_row(trials: CallTrials) -> ToolFormat | None:
    """Returns a row that reads all that the template writes, of other names too, or None."""
    if not trials.shows_a_call:
        return None
    for segment in trials.trials[0].segments:
        if FIRST.name not in segment:
            continue
        for row in _guesses(segment):
            full = replace(row, separator=_separator(trials, row))
            full = replace(full, triggers=trials.triggers_of(full))
            if trials.score(full)[0] == len(trials.trials):
                return full
    return None


def _guesses(text: str) -> Iterator[ToolFormat]:
    yield from _as_object(text)
    yield from _as_named(text)
    yield from _as_tags(text)


def _as_object(text: str) -> Iterator[ToolFormat]:
    """The name and the arguments are members of one object."""
    at = text.find(FIRST.name)
    while (at := text.rfind("{", 0, at)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except ValueError:
            continue
        if not isinstance(value, dict):
            continue
        names = [key for key, member in value.items() if member == FIRST.name]
        bodies = [key for key, member in value.items() if member == dict(FIRST.arguments)]
        if not names or not bodies:
            continue
        before, after = text[:at], text[end:]
        row = ToolFormat(name=NAME, syntax="json", name_key=names[0], arguments_key=bodies[0])
        if before.rstrip().endswith("[") and after.lstrip().startswith("]"):
            around = before.rstrip()[:-1], after.lstrip()[1:]
            yield replace(row, layout="list", section=around, bare=not around[0].strip())
        yield replace(row, call=(before, after), bare=not before.strip())


def _as_named(text: str) -> Iterator[ToolFormat]:
    """The arguments' object stands behind the name."""
    before, _, rest = text.partition(FIRST.name)
    arguments = json_text(dict(FIRST.arguments))
    at = rest.find("{")
    if at < 0 or not before.strip():
        return
    try:
        value, end = _DECODER.raw_decode(rest, at)
    except ValueError:
        return
    if value == json.loads(arguments):
        yield ToolFormat(
            name=NAME,
            syntax="json",
            layout="named",
            call=(before, rest[end:]),
            function=("", rest[:at]),
        )


def _as_tags(text: str) -> Iterator[ToolFormat]:
    """Each argument stands between tags."""
    words = [FIRST.name]
    for key, value in FIRST.arguments.items():
        words += [key, str(value)]
    gaps: list[str] = []
    rest = text
    for word in words:
        gap, separator, rest = rest.partition(word)
        if not separator:
            return
        gaps.append(gap)
    before, to_key, to_value, between, to_other = gaps
    if to_value != to_other or not before.strip():
        return
    for length in range(len(_common(between, rest)), 0, -1):
        close, key = between[:length], between[length:]
        if close.strip() and key.strip() and to_key.endswith(key):
            yield ToolFormat(
                name=NAME,
                syntax="tagged",
                function=(before, to_key[: len(to_key) - len(key)]),
                key=(key, to_value),
                value=("", close),
                arguments=("", rest[length:]),
            )


def _common(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]


def _separator(trials: CallTrials, row: ToolFormat) -> str:
    """What the template writes between two calls."""
    two = next((trial for trial in trials.trials if len(trial.calls) == 2), None)
    if two is None or row.section != ("", ""):
        return ""
    first, second = (render_calls(row, [call]) for call in (FIRST, SECOND))
    for segment in two.segments:
        behind = segment.partition(first)[2]
        if second in behind:
            return behind.partition(second)[0]
    return ""
