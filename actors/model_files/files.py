"""Files of a model's folder, or of a model on the Hub."""

import json
from pathlib import Path
from typing import Any

from rayfin.actors.errors import InvalidConfig


def find_file(model: str, name: str, **hub: Any) -> Path | None:
    """A file of a model's folder, or of a model on the Hub (``EngineArgs.hub``), if it is there."""
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
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
    return None if found is None else Path(found)


def read_object(model: str, name: str, **hub: Any) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file, or no object that can be read."""
    path = find_file(model, name, **hub)
    try:
        content = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def require_safetensors(model: str) -> None:
    """Raises unless a local folder holds weights in safetensors form.

    Raises:
        InvalidConfig: the folder holds no safetensors file.
    """
    folder = Path(model)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise InvalidConfig(
            f"{model} holds no .safetensors file; Rayfin loads no pickled weights", "model"
        )
