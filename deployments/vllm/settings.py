"""vLLM's settings of an engine, as ``LLM`` takes them, under Rayfin's names."""

import logging
from collections.abc import Container, Mapping
from dataclasses import fields
from typing import Any

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.vllm.table import (
    NOT_NEEDED,
    VLLM_FLAGS,
    Accepted,
    Alias,
    Lacks,
    Rewritten,
)

logger = logging.getLogger(__name__)

SETTINGS = frozenset(field.name for field in fields(EngineArgs))
BY_NAME = {
    name.removeprefix("--").replace("-", "_"): flag
    for flag in VLLM_FLAGS
    for name in flag.names
    if name.startswith("--")
}
FALSY: tuple[Any, ...] = (None, False, "", {}, [], ())


def engine_settings(given: Mapping[str, Any], known: Container[str] = SETTINGS) -> dict[str, Any]:
    """Settings by Rayfin's names, of those by vLLM's names or Rayfin's; None is the default.

    A name that nothing has stays, for ``EngineArgs`` to refuse.

    Args:
        known: what can be set; a server's other settings are without effect.

    Raises:
        InvalidConfig: Rayfin lacks what one asks for, or two are one.
    """
    settings: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in given.items():
        setting, value = _translated(name, value, known)
        if not setting or (value is None and setting in known):
            continue
        if (earlier := written.setdefault(setting, name)) != name:
            raise InvalidConfig(f"{earlier} and {name} are one setting: give one of them", name)
        settings[setting] = value
    return settings


def _translated(name: str, value: Any, known: Container[str]) -> tuple[str, Any]:
    """The setting and its value; "" where there is nothing to set."""
    flag = BY_NAME.get(name)
    if flag is None:
        return name, value
    outcome = flag.outcome
    if isinstance(outcome, Alias):
        return _aliased(name, value, outcome, known)
    if name in known:
        return name, value
    if isinstance(outcome, Rewritten):
        return _rewritten(name, value, outcome, known)
    if isinstance(outcome, Accepted) and value not in FALSY:
        logger.warning("%s %s", name, NOT_NEEDED)
    if isinstance(outcome, Lacks) and value not in FALSY and str(value) not in outcome.but:
        raise InvalidConfig(f"{name} is not supported: Rayfin has no {outcome.missing}", name)
    return "", None


def _aliased(name: str, value: Any, outcome: Alias, known: Container[str]) -> tuple[str, Any]:
    if outcome.setting not in known:
        return _of_a_server(name, value)
    word = str(value).removeprefix("torch.")  # a dtype of torch's is its name
    if word in outcome.nothing:
        return "", None
    words = {theirs.lower(): ours for theirs, ours in outcome.words.items()}
    if outcome.setting == "dtype" and value is not None:
        value = word
    return outcome.setting, words.get(word.lower(), value)


def _rewritten(name: str, value: Any, outcome: Rewritten, known: Container[str]) -> tuple[str, Any]:
    """A switch as the setting that it stands for: "--steps-in-flight=2" is 2."""
    text = "" if value is None else outcome.on if value else outcome.off
    flag, equals, word = text.removeprefix("--").partition("=")
    setting = flag.removeprefix("no-").replace("-", "_")
    if text and setting not in known:
        return _of_a_server(name, value)
    written = word if equals else not flag.startswith("no-")
    return setting, int(word) if word.isdigit() else written


def _of_a_server(name: str, value: Any) -> tuple[str, Any]:
    if value not in FALSY:
        logger.warning("%s has no effect: it is for rayfin serve", name)
    return "", None
