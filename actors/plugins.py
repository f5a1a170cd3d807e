"""Code of a user's own, by ``--plugin KIND=module:name``: nothing is loaded that is not named.

The name may also be that of an entry point in the group ``rayfin.KIND``. Who calls them is the
owner of each hook; this module finds them, checks them, and contains what they raise.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.parts import PartUsage

logger = logging.getLogger(__name__)

RULE = "add remove is_active accept rollback device_rules apply"
CONTRACTS = {
    "setup": ("a function without arguments, called once in each process", ""),
    "logits_processor": ("a class (device) with the methods of LogitsProcessor", RULE),
    "proposer": ("a class () with the methods of Proposer", "add remove accept propose"),
    "observer": (
        "a class () with the methods of Observer",
        "before forwarded after overwritten close",
    ),
    "gate": ("a class () with may_admit(request: EngineRequest) -> bool", "may_admit"),
    "route": ("a function (app: fastapi.FastAPI) that adds routes", ""),
    "format": ("a function () that returns a ToolFormat or a ReasoningFormat", ""),
    "stat_logger": ("a class () with log(engine: str, stats: EngineStats)", "log"),
}
"""What each kind is, and the methods of its class."""

MAX_ERRORS = 3  # of an object, after which it is not called any more


def check_plugins(named: Sequence[str] | None) -> None:
    """Checks the form of the names; imports nothing.

    Raises:
        InvalidConfig: an unknown kind, no name, or one twice.
    """
    for value in named or ():
        kind, _, name = value.partition("=")
        if kind not in CONTRACTS or not name:
            kinds = ", ".join(CONTRACTS)
            raise _refused(f"must be KIND=module:name with a KIND of {kinds}, got {value!r}")
    if len(set(named or ())) < len(named or ()):
        raise _refused(f"names one twice: {', '.join(named or ())}")
    if sum(value.startswith("proposer=") for value in named or ()) > 1:
        raise _refused("names two proposers")


def plugins(named: Sequence[str] | None, kind: str) -> list[Any]:
    """Loads what the names of a kind mean, in their order.

    Raises:
        InvalidConfig: one cannot be imported, or does not fit its kind.
    """
    return [_load(*value.split("=", 1)) for value in named or () if value.startswith(f"{kind}=")]


def read_tokens(named: Sequence[str]) -> bool:
    """Returns whether some of them read the tokens of requests, and need those before a replay."""
    return any(value.startswith("logits_processor=") for value in named)


@cache
def set_up_plugins(named: tuple[str, ...]) -> None:
    """Calls those of the kind ``setup``, once in this process."""
    for call in plugins(named, "setup"):
        call()


def _load(kind: str, name: str) -> Any:
    module, colon, path = name.partition(":")
    try:
        if colon:
            plugin = getattr(import_module(module), path)
        else:
            (point,) = entry_points(group=f"rayfin.{kind}", name=name)
            plugin = point.load()
    except Exception as error:
        raise _refused(f"{kind}={name} cannot be loaded: {error!r}") from error
    contract, methods = CONTRACTS[kind]
    missing = [method for method in methods.split() if not hasattr(plugin, method)]
    if missing or not callable(plugin) or (methods != "" and not isinstance(plugin, type)):
        lacks = f"; it lacks {', '.join(missing)}" if missing else ""
        raise _refused(f"{kind}={name} must be {contract}{lacks}")
    return plugin


def _refused(message: str) -> InvalidConfig:
    return InvalidConfig(f"plugin {message}", "plugin")


@dataclass(slots=True, frozen=True)
class PluginUsage(PartUsage):
    """What a runner spent in plug-ins since its last result."""

    seconds: Mapping[str, float]  # by their names


def name_of(plugin: type) -> str:
    """Returns a class as --plugin names it."""
    return f"{plugin.__module__}:{plugin.__qualname__}"


class Timed:
    """An object whose methods add their time to ``spent``, under its name."""

    def __init__(self, inner: Any, methods: Iterable[str], spent: Counter[str]) -> None:
        self._name = name_of(type(inner))
        self._spent: Any = spent  # Counter's type is that of whole numbers
        for name in methods:
            setattr(self, name, partial(self._call, getattr(inner, name)))

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args)
        finally:
            self._spent[self._name] += time.perf_counter() - began


class Contained(Timed):
    """A ``Timed`` that never raises; after some errors its methods are not called any more.

    Args:
        answer: what each method returns in place of an error.
    """

    def __init__(
        self, inner: Any, methods: Iterable[str], spent: Counter[str], answer: Any = None
    ) -> None:
        super().__init__(inner, methods, spent)
        self.in_turn = getattr(inner, "in_turn", True)  # of a StepObserver
        self._answer = answer
        self._errors = 0

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        if self._errors < MAX_ERRORS:
            try:
                return super()._call(method, *args)
            except Exception:
                self._errors += 1
                last = "; it is dropped" if self._errors == MAX_ERRORS else ""
                logger.exception("plugin %s has raised%s", self._name, last)
        return self._answer


def contained(plugin: Any, kind: str, spent: Counter[str], answer: Any = None) -> Any:
    """An object of a class of :func:`plugins` that gives ``answer`` where it raises."""
    return Contained(plugin(), CONTRACTS[kind][1].split(), spent, answer)


def timed(plugin: Any, kind: str, spent: Counter[str]) -> Callable[[], Any]:
    """Makes objects of a class of :func:`plugins` that add their time to ``spent``."""
    methods = [*CONTRACTS[kind][1].split(), *({"seconds"} & set(dir(plugin)))]  # of a Stepping
    return lambda: Timed(plugin(), methods, spent)
