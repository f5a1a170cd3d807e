"""The adapters of a start: what ``--lora-modules`` and ``--lora-dir`` say."""

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfin.actors.adapters.files import CONFIG
from rayfin.actors.buckets.folder import bucket_folder, is_bucket, list_files
from rayfin.actors.errors import InvalidConfig

logger = logging.getLogger(__name__)

CLIENTS_MAY_LOAD = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""The environment variable, vLLM's, that lets clients load adapters if it is 1."""


@dataclass(frozen=True, slots=True)
class AdapterFlags:
    """Where a model's adapters come from."""

    modules: dict[str, str]  # paths by name, which are loaded at the start
    root: str | None  # the folder whose subfolders requests may name
    max_rank: int = 64

    def check(self) -> None:
        """Checks at the start, and on its node alone, that the folder is there.

        Raises:
            InvalidConfig: it is not.
        """
        if self.root is None or is_bucket(self.root):
            return
        if not Path(self.root).is_dir():
            raise InvalidConfig(f"there is no folder {self.root}", "lora_dir")

    def reach(self) -> None:
        """Asks once for the files of a bucket.

        Raises:
            InvalidConfig: it is not there, or refuses.
        """
        if self.root is not None and is_bucket(self.root):
            list_files(self.root)

    @property
    def any(self) -> bool:
        """Returns whether some are given."""
        return bool(self.modules) or self.root is not None


def read_modules(values: Iterable[str] | None) -> dict[str, str]:
    """Paths by name, of vLLM's forms ``name=path`` and {"name": ..., "path": ...}.

    Raises:
        InvalidConfig: another form, or a name twice.
    """
    modules: dict[str, str] = {}
    for value in values or ():
        name, path = _json_module(value) if value.startswith("{") else _plain_module(value)
        if name in modules:
            raise InvalidConfig(f"lora_modules names {name!r} twice", "lora_modules")
        modules[name] = path
    return modules


def folders_in(root: str) -> dict[str, str]:
    """The paths of the adapters within ``root`` by their names; none where it cannot be read."""
    try:
        if is_bucket(root):
            files = [path.split("/") for path in list_files(root)]
            names = sorted(path[0] for path in files if path[1:] == [CONFIG])
            return {name: f"{root.rstrip('/')}/{name}" for name in names}
        folders = {name: folder_in(root, name) for name in sorted(os.listdir(root))}
    except (OSError, InvalidConfig) as error:
        logger.warning("the adapters in %s cannot be listed: %s", root, error)
        return {}
    return {
        name: str(folder)
        for name, folder in folders.items()
        if folder and (folder / CONFIG).is_file()
    }


def folder_in(root: str, name: str) -> Path | None:
    """The folder of the adapter ``name`` within ``root``, None if it is no folder directly in it.

    A name is one segment of a path, and no link leads out. One in a bucket is read first.

    Raises:
        InvalidConfig: the bucket refuses.
    """
    if not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
        return None
    if is_bucket(root):
        there = f"{name}/{CONFIG}" in list_files(root)
        return bucket_folder(f"{root.rstrip('/')}/{name}") if there else None
    base = Path(root).resolve()
    folder = (base / name).resolve()
    return folder if folder.parent == base and folder.is_dir() else None


def _plain_module(value: str) -> tuple[str, str]:
    name, _, path = value.partition("=")
    if not name or not path:
        raise _wrong(value)
    return name, path


def _json_module(value: str) -> tuple[str, str]:
    try:
        module: Any = json.loads(value)
    except ValueError:
        raise _wrong(value) from None
    known = isinstance(module, dict) and module.keys() <= {"name", "path", "base_model_name"}
    name, path = (module.get("name"), module.get("path")) if known else (None, None)
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        raise _wrong(value)
    return name, path


def _wrong(value: str) -> InvalidConfig:
    return InvalidConfig(
        f'lora_modules must be name=path or {{"name": ..., "path": ...}}, got {value!r}',
        "lora_modules",
    )
