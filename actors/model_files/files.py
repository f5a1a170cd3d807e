"""Files of a model's folder, or of a model on the Hub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfin.actors.errors import InvalidConfig

_paths: dict[tuple[Any, ...], Path] = {}
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
    if (known := _paths.get(asked)) is not None and known.is_file():
        return known
    from transformers.utils.hub import cached_file

    try:
        cached = cached_file(
            model,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **hub,
        )
    except OSError:
        return None
    if cached is None:
        return None
    _paths[asked] = Path(cached)
    return Path(cached)


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


FILE = "generation_config.json"

TEXT_PARTS = ("decoder", "generator", "text_config")
"""Where config.json has the values of its part that writes text; the first one counts."""


def generation_config(model: str | Path, **hub: Any) -> dict[str, Any]:
    """Reads the values that transformers' ``generate`` takes from a folder, or a model on the Hub.

    If there is a generation_config.json, it alone decides: what it lacks is not set. Otherwise it
    is config.json, where a value of the whole model counts before one of its text part.

    Raises:
        InvalidConfig: a file is not a JSON object.
    """
    if find_file(str(model), FILE, **hub) is not None:
        return model_json(model, FILE, **hub)
    config = model_json(model, "config.json", **hub)
    part = next((config[name] for name in TEXT_PARTS if config.get(name)), None)
    both = (part if isinstance(part, Mapping) else {}, config)
    return {name: value for held in both for name, value in held.items() if value is not None}


def end_token_ids(values: Mapping[str, Any]) -> frozenset[int]:
    """Returns the ids that end an answer, by ``generation_config`` or changes of it."""
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return frozenset(
        token for token in ids if isinstance(token, int) and not isinstance(token, bool)
    )
