"""Loads a model from a version of its weights: its own folder, with other safetensors files."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.digests import tensors_digest
from rayfin.actors.model_files.files import find_file
from rayfin.actors.model_files.shards import INDEX, SINGLE
from rayfin.actors.weights.version import WeightVersion


def require_content(version: WeightVersion) -> None:
    """Compares the tensors of a version with its digest.

    Raises:
        InvalidConfig: they are others, or not there.
    """
    try:
        digest = tensors_digest(version.files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        digest = str(error)
    if digest != version.digest:
        raise InvalidConfig(
            f"the weights {version.label!r} in {version.place} are not those that were decided: "
            f"send them again ({digest[:100]})",
            "weights",
        )


@contextmanager
def model_folder(args: EngineArgs, version: WeightVersion) -> Iterator[EngineArgs]:
    """The settings of a folder with all of the model's small files and the version's tensors.

    The folder is gone afterwards: what is mapped of it stays.

    Raises:
        InvalidConfig: the model has no folder.
    """
    config = find_file(args.model, "config.json", **args.hub)
    if config is None:
        raise InvalidConfig(f"{args.model} is no folder, and takes no new weights", "model")
    folder = Path(tempfile.mkdtemp(prefix="rayfin-version-"))
    try:
        for path in config.parent.iterdir():
            if path.suffix != ".safetensors" and path.name != INDEX:
                (folder / path.name).symlink_to(path.resolve())
        files, place = version.files, Path(version.place)
        for file in files:
            name = file.name if place.is_dir() else SINGLE
            (folder / name).symlink_to(file.resolve())
        if place.is_dir() and (place / INDEX).is_file():
            (folder / INDEX).symlink_to(place / INDEX)
        yield replace(
            args, model=str(folder), revision=None, load_format="auto", weights_cache="off"
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
