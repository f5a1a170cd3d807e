"""Files of a model's folder, or of a model on the Hub."""

import json
from pathlib import Path
from typing import Any

from rayfin.actors.errors import InvalidConfig

_found: dict[tuple[Any, ...], Path] = {}
"""Where ``find_file`` has found files of the Hub: in folders of one commit, which never change."""


def find_file(model: str, name: str, **hub: Any) -> Path | None:
    """A file of a model's folder, or of a model on the Hub (``EngineArgs.hub``), if it is there.

    The Hub is asked once in a process: it answers each call with a request of its own, also for a
    file that is in its cache.
    """
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    asked = (model, name, *sorted(hub.items()))
    if (known := _found.get(asked)) is not None and known.is_file():
        return known
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(
            model,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **hub,
        )
    except OSError:
        return None
    if found is None:
        return None
    _found[asked] = Path(found)
    return Path(found)


def read_object(model: str, name: str, **hub: Any) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file, or no object that can be read."""
    path = find_file(model, name, **hub)
    try:
        content = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def model_json(model: str | Path, name: str, **hub: Any) -> dict[str, Any]:
    """Returns a JSON file of a model folder or of a model on the Hub; empty if it does not exist.

    Raises:
        InvalidConfig: the file is not a JSON object.
    """
    path = find_file(str(model), name, **hub)
    if path is None or not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidConfig(f"{name} of {model} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidConfig(f"{name} of {model} must hold a JSON object.")
    return content
