"""Code of a user's own, by ``--plugin KIND=module:name``: nothing is loaded that is not named.

The name may also be that of an entry point in the group ``rayfin.KIND``. Who calls them is the
owner of each hook; this module finds them, checks them, and contains what they raise.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from rayfin.actors.errors import InvalidConfig

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


class Contained:
    """An object whose methods never raise; after some errors they are not called any more.

    Args:
        methods: its methods, and what each returns in place of an error.
    """

    def __init__(self, inner: Any, methods: dict[str, Any]) -> None:
        self.in_turn = getattr(inner, "in_turn", True)  # of a StepObserver
        self._name = type(inner).__qualname__
        self._errors = 0
        for name, answer in methods.items():
            setattr(self, name, partial(self._call, getattr(inner, name), answer))

    def _call(self, method: Callable[..., Any], answer: Any, *args: Any) -> Any:
        if self._errors < MAX_ERRORS:
            try:
                return method(*args)
            except Exception:
                self._errors += 1
                last = "; it is dropped" if self._errors == MAX_ERRORS else ""
                logger.exception("plugin %s has raised%s", self._name, last)
        return answer


def contained(plugin: Any, kind: str, answer: Any = None) -> Any:
    """An object of a class of :func:`plugins` that gives ``answer`` where it raises."""
    return Contained(plugin(), dict.fromkeys(CONTRACTS[kind][1].split(), answer))
