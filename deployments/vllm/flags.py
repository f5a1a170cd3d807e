"""What a flag of vLLM's ``serve`` is for ``rayfin serve``: the kinds of rows of the table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Form = Literal["value", "switch", "once", "several", "config"]
"""What follows a flag: a value; nothing (``switch`` has a ``--no-`` form, ``once`` has none);
several values; or JSON, whose keys may also be written as ``--flag.key value``."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A setting of Rayfin's has the same meaning.

    Attributes:
        setting: the field or option.
        words: vLLM's values by their names here; other values stay.
        sizes: whether the value may be written as 8k, 8K, 1.5M.
        nothing: values that stand for the default.
    """

    setting: str
    words: Mapping[str, str] = field(default_factory=dict)
    sizes: bool = False
    nothing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A switch that stands for a setting with a value: ``on``, and ``off`` for its other form."""

    on: str
    off: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Rayfin does not need the flag. A line of the log says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lacks:
    """Rayfin lacks what the flag asks for.

    Attributes:
        missing: completes "Rayfin has no ...".
        but: values that ask for nothing that is missing, and are accepted.
    """

    missing: str
    but: tuple[str, ...] = ()


Outcome = Alias | Rewritten | Accepted | Lacks


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """One flag of vLLM's.

    Attributes:
        names: the long one first.
        meaning: what it sets, in a few words.
        earlier: whether only earlier versions of vLLM have it.
    """

    names: tuple[str, ...]
    meaning: str
    outcome: Outcome
    form: Form = "value"
    earlier: bool = False


def value(names: str, meaning: str, outcome: Outcome) -> VllmFlag:
    return VllmFlag(tuple(names.split()), meaning, outcome)


def switch(names: str, meaning: str, outcome: Outcome) -> VllmFlag:
    return VllmFlag(tuple(names.split()), meaning, outcome, "switch")


def once(names: str, meaning: str, outcome: Outcome) -> VllmFlag:
    return VllmFlag(tuple(names.split()), meaning, outcome, "once")


def several(names: str, meaning: str, outcome: Outcome) -> VllmFlag:
    return VllmFlag(tuple(names.split()), meaning, outcome, "several")


def config(names: str, meaning: str, outcome: Outcome) -> VllmFlag:
    return VllmFlag(tuple(names.split()), meaning, outcome, "config")
